"""What the layers of a decoder are worth, and checkpoints without some of them."""
