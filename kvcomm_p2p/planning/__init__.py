"""Pure decisions shared by the engine and the simulator: what is equal, what to reuse, what to recompute.

No torch, no sockets, no clocks: token ids in, a plan out. Read in this order: `types`, `chains`, `winnow`, `runs`,
`costs`, `plan`.
"""
