"""The daemon: its service, its data plane, and what it holds for attached clients.

``service`` wires everything and has no policy; ``plane`` joins stores and pumps; ``attach`` speaks
with engines; ``rings`` reads their counters; ``claims`` are the locks and sockets that one daemon
holds at a time. Nothing is imported here: a part costs what it needs, not the whole daemon.
"""
