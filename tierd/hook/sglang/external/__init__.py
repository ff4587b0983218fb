"""For the ways to start SGLang that load no plugins (Ray, ``sglang.benchmark.one_batch``).

``SGLANG_EXTERNAL_MODEL_PACKAGE=tierd.hook.sglang.external`` makes SGLang import this when it lists
its models, before one is constructed. An error here is not swallowed.
"""

from tierd.hook.sglang import activate

activate()
