"""What agents are asked in an evaluation: pure, seeded conversations. Running them is `kvcomm_p2p.evaluation.eval`."""
