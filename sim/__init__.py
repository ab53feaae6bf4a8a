"""The simulator: many `protocol.Node`s under a virtual clock and network, deciding with `kvcomm_p2p.planning`.

Begin with `world.World`, which carries out what nodes ask for, then `agents.SimAgent` and `simulation.Simulation`. Never imports
torch, zmq or the wall clock.
"""
