"""Products of rows with the experts that they are routed to, of which a pool holds those in use, dense.

    tiles             rows come sorted by expert, in tiles; of each tile its expert is known, on the device
    slot              memory of the pool for one expert: slot s holds the s-th expert that has a tile
    round             a pool of fewer slots than experts in use holds them in turn: `first` is the place in
                      the list of experts that slot 0 holds in this round

Neither function waits for the device, so that both fit into a CUDA graph: their launches depend on sizes
alone. Programs of tiles that are not in use, or whose expert has its turn in another round, end at once.
"""
