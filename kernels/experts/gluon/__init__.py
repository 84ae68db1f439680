"""Products of tokens with the packed weights of their experts, on Hopper, in Gluon."""
