"""``python -m tests.sim``: run seeds; see ``--help`` and docs/simulator.md."""

from tests.sim.runner import main

if __name__ == "__main__":
    raise SystemExit(main())
