"""Triton kernels, one operation per file.

Names in kernels: `inside` and `valid` are load and store masks, `offs` are offsets, `i` are sample indices, `d_x` is
the gradient of the loss with respect to x. A constant with the suffix _P2 is rounded up to a power of two; BM, BN, BK,
BR, BC are tile sizes; INS and OUTS are a layer's inputs and outputs; an observation has OBS_WORDS 4-byte words; NVEC
holds the number of categories of each discrete action, REALS is the number of continuous actions.
"""
