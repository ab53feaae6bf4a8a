"""Pure decisions shared by the engine and the simulator: what is equal, what to reuse, what to recompute.

No torch, no sockets, no clocks: token ids in, a plan out. Read in this order: `types`, `chains` (names for content),
`winnow` (fingerprints), `runs` (equal stretches), `costs`, `prefix` and `candidates` (what could be used), `plan`,
`spans` (what a plan means), `segments` (what is published afterwards).
"""
