"""Room of the simulator, which does not exist yet: many `protocol.Node`s under a virtual clock and network, deciding with
`kvcomm_p2p.planning`. It will import protocol, planning, networkx and numpy, and never torch, zmq or the wall clock.
"""
