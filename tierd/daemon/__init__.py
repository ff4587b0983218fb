"""The daemon: its service, its data plane, and what it holds for attached clients.

``service`` wires everything and has no policy; ``plane`` joins stores and pumps; ``attach`` speaks
with engines; ``rings`` reads their counters; ``claims`` are the locks and sockets that one daemon
holds at a time.
"""

from tierd.daemon.service import Api as Api
from tierd.daemon.service import Daemon as Daemon
from tierd.daemon.service import Identity as Identity
from tierd.daemon.service import serve as serve
