"""Chaos: daemons and engines are killed, stopped, restarted and starved while rows are compared.

``python -m tests.chaos`` runs the whole matrix, ``--seed`` and ``--case`` replay a part of it, and
``--kills N`` goes on with random faults until N daemons have been killed.
"""
