"""The gossip-and-pull protocol as a pure state machine.

Nothing here reads a clock, draws from a module-level random generator, opens a socket or touches a tensor. A `Node` is
told what happened (`events`), answers with what to do (`effects`), and says when it wants to be woken. Two interpreters
carry effects out: `kvcomm_p2p.net.driver.Driver` for real, `kvcomm_p2p.sim.World` under a virtual clock.

Determinism: never iterate a set into an output, `sorted()` before any random choice, no `hash()` and no `id()`.
Read in this order: `anchors` (nouns), `messages` (wire vocabulary), `events`, `node`.
"""
