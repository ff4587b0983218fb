"""The simulator: storage, pump and client in one thread, under faults, from one seed.

``docs/simulator.md`` says what is simulated and how to replay a failure.
"""
