"""Mixtures of experts: products of the rows of each expert with its packed weights, chosen on the device.

A router names k experts for each token. A *pair* is a token and one of its slots: pair p = token * k + slot.
The weights of all experts are one packed matrix [experts * out, in]: expert e has rows e * out to
(e + 1) * out - 1. A layer takes four launches, and the host never waits for what the router chose:

    route          sorts pairs by expert and copies x into *rows*, in tiles that belong to one expert each
    gated_linear   gate and up of each tile, and silu(gate) * up
    grouped_linear the down projection of each tile
    weighted_sum   the weighted sum over the slots of each token

Only experts in use are read. `routing` says how tiles lie. Rows that no pair fills are undefined memory:
nothing may depend on them. An id outside 0 to experts - 1 is a *sentinel*: its pair has no row and adds
nothing, as expert-parallel models want it.

`ops` has the functions that models call. On a CPU plain torch does the work. On a GPU Triton does, and on
Hopper the kernels of `gluon` where they take the weights.
"""
