"""What runs inside an engine: the client of the daemon, and the tables it serves.

numpy, torch, triton, the core and the standard library; nothing else may be imported here.
"""
