"""One engine in one process, told what to do in lines of JSON: ``... engine MODEL`` with a pipe.

Each line is ``{"do": NAME, ...}``; the answer is one line on the descriptor in TIERD_BENCH_ANSWERS.
vLLM's own output goes where standard output goes. With TIERD=1 its tables come from a daemon.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8,
    "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.1, "enable_prefix_caching": False,
    "seed": 0, "kv_cache_memory_bytes": 1 << 30,
}  # fmt: skip
UNTIMED = 3  # steps
# Of a model by the name of its directory, up to a hyphen.
SPECIAL: dict[str, dict[str, Any]] = {
    "q4": {"additional_config": {"gdn_prefill_backend": "triton"}},
    "engram": {"compilation_config": {"mode": 0}},
}


class Engine:
    def __init__(self, model: Path) -> None:
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        name = model.name.partition("-")[0]
        if name == "engram":
            from bench.vllm_on_gpu import engram_model

            engram_model.register()
        self.llm = LLM(model=str(model), **OPTIONS, **SPECIAL[name])
        self.asked = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens of all prompts as one batch."""
        asked = self.sampling(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        made = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False
        )
        return [list(one.outputs[0].token_ids) for one in made]

    def one_by_one(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Tokens of each prompt alone: a batch's company changes roundings in stock vLLM, too."""
        made, longest = [], 0.0
        for prompt in prompts:
            began = time.perf_counter()
            made += self.generate([prompt], tokens)
            longest = max(longest, time.perf_counter() - began)
        return {"tokens": made, "longest_s": longest}

    def timed(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Microseconds of each decode step of a batch, from one step's tokens to the next one's.

        The first steps, which read the prompts and fill the pipeline, do not count.
        """
        asked = self.sampling(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        engine = self.llm.llm_engine
        for prompt in prompts:
            self.asked += 1
            engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, asked)
        made = []
        while engine.has_unfinished_requests():
            if engine.step():
                made.append(time.perf_counter())
        steps = [(b - a) * 1e6 for a, b in itertools.pairwise(made[UNTIMED:])]
        return {"steps_us": steps, "tpot_us": sum(steps) / len(steps)}

    def gaps(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """What a GPU does in such steps: its kernels, and the pause between one and the next.

        Traced, a step takes longer; the pauses of two engines compare all the same.
        """
        from torch.profiler import ProfilerActivity, profile

        self.timed(prompts, tokens)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                self.timed(prompts, tokens)
            trace.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        kernels = sorted((e["ts"], e["dur"]) for e in events if e.get("cat") == "kernel")
        pauses = [b[0] - a[0] - a[1] for a, b in itertools.pairwise(kernels)]
        return {
            "kernels_a_step": len(kernels) / tokens,
            "kernel_us": statistics.median(duration for _, duration in kernels),
            "pause_us": statistics.median(pauses),
        }

    def settings(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        compilation = config.compilation_config
        return {
            "graphs": str(compilation.cudagraph_mode),
            "mode": str(compilation.mode),
            "sizes": list(compilation.cudagraph_capture_sizes),
            "engram": str(config.engram_config),
            "async": bool(config.scheduler_config.async_scheduling),
        }

    def counters(self) -> dict[str, Any]:
        """Of the served tables; empty without tierd."""
        if os.environ.get("TIERD") != "1":
            return {}
        from tierd.hook.vllm import tables

        found: dict[str, Any] = {"tables": {}}
        for rank in tables.RANKS.all():
            assert rank.attached is not None
            keeper = rank.attached.client.keeper
            found |= {"takeovers": keeper.takeovers, "attaches": keeper.attaches}
            for table in rank.tables:
                found["tables"][str(table.layer)] = table.stats()
        return found

    def zero(self) -> dict[str, Any]:
        """Zero the stock engine's tables, so that a comparison can fail."""
        return {"zeroed": sum(self.llm.apply_model(zero_tables))}


def zero_tables(model: Any) -> int:
    zeroed = 0
    for module in model.modules():
        if type(module).__name__ in {"ParallelEngramEmbedding", "Qwen4ExpPLEPinnedHostEmbedding"}:
            module.weight.data.zero_()
            zeroed += module.weight.shape[0]
    return zeroed


def main() -> None:
    with os.fdopen(int(os.environ["TIERD_BENCH_ANSWERS"]), "w") as answers:

        def answer(found: Any) -> None:
            answers.write(json.dumps(found) + "\n")
            answers.flush()

        began = time.perf_counter()
        engine = Engine(Path(sys.argv[1]))
        answer({"ready_s": time.perf_counter() - began, **engine.settings()})
        for line in sys.stdin:
            asked = json.loads(line)
            answer(getattr(engine, asked.pop("do"))(**asked))


if __name__ == "__main__":
    main()
