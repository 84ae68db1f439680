"""Where tensors come from: checkpoints on the disk, plain or compressed, and the Hub."""
