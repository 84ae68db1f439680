"""Where the tensors of a checkpoint come from: a folder, containers, or the Hub."""
