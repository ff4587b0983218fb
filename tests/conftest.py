"""Before any test module is imported: Triton's kernels are interpreted, there is no GPU here.

Triton decides at its first import, which may be torch's, so no test module can set this in time.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
