"""Several processes that train one model, and what happens when one of them ends.

Who they are and how they meet:
    place             which process this is, from a launcher or from flags
    signpost          where rank 0 is found
    rendezvous        how all come together
    network           this machine's addresses
    world             what a rank knows of the others; to meet, connect, agree and end
What becomes of them:
    watch             ends this process when another is gone, hangs or stops
    verdict           what beats say about that
What they do together:
    gloo              collectives on CPUs
    group             collectives on tensors and shares
    sharing           data parallelism and ZeRO: gradients summed, weights gathered, layer by layer
    tensor_parallel   each rank with a part of every layer
"""
