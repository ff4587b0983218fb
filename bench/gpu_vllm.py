"""Unmodified vLLM on one H200, served by a running daemon on a loop device, against itself.

    python -m bench.gpu_vllm --models DIR --site DIR [--out FILE]     prints one raw line of JSON

Three engines of each model of bench/vllm_on_gpu run side by side: the stock one, one with a cache
that holds its tables, and one whose cache is so small that every step reads rows from the device.
Prompts are compared one at a time; time per output token is taken in turns; then the daemon is
killed again and again while the third ones generate; last, the stock tables are zeroed, which must
change tokens. SITE is what bench/vllm_on_gpu/unpack.py made. ``python -m bench.gpu_vllm_records``
makes records of the line.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.errors import AttachError
from tierd.gpu import client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("q4", "engram")
CACHES = {"warm": 1 << 16, "cold": 512}  # rows; the tables have some 16,800
PROMPTS, TOKENS = 110, 24  # of each model
DEEP = ("q4-deep", "engram-deep")  # times are taken of these
BATCH, ROUNDS, TIMED_TOKENS, TRACED_TOKENS = 8, 40, 40, 16
KILLS, CHUNK = 24, 4
ZEROED = 8
TIMEOUT_S = 60.0  # an answer that takes longer is a hang
_SET_FD, _CLR_FD, _GET_FREE = 0x4C00, 0x4C01, 0x4C82


# --- the daemon ----------------------------------------------------------------------------------


@contextlib.contextmanager
def loop_device(file: Path) -> Iterator[tuple[Path, str]]:
    """A loop device over a file and what it is in words; the file itself where there are none."""
    try:
        control = os.open("/dev/loop-control", os.O_RDWR)
        number = fcntl.ioctl(control, _GET_FREE)
        os.close(control)
        path = Path(f"/dev/loop{number}")
        if not path.exists():  # no devtmpfs
            os.mknod(path, 0o600 | 0o060000, os.makedev(7, number))
        loop = os.open(path, os.O_RDWR)
        backing = os.open(file, os.O_RDWR)
        fcntl.ioctl(loop, _SET_FD, backing)
        os.close(backing)
    except OSError as error:
        yield file, f"a file ({error.strerror})"
        return
    os.close(loop)
    try:
        yield path, "a loop device"
    finally:
        loop = os.open(path, os.O_RDWR)
        fcntl.ioctl(loop, _CLR_FD)
        os.close(loop)


class Daemon:
    """``tierd serve``, killed and started again."""

    def __init__(self, directory: Path, device: Path, cores: set[int]) -> None:
        self._cores = cores
        self.socket = directory / "engine.sock"
        self._log = (directory / "daemon.log").open("ab")
        self._words = [
            sys.executable, "-m", "tierd.cli", "serve", "--dir", str(directory), "--device",
            str(device),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._words, cwd=ROOT, stderr=self._log)
        os.sched_setaffinity(self._process.pid, self._cores)

    def wait(self, images: int = 2 * len(MODELS)) -> None:
        """Until it serves so many images."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            with contextlib.suppress(AttachError):
                if len(client.list_images(self.socket, wait_s=TIMEOUT_S)) == images:
                    return
            time.sleep(0.02)
        raise SystemExit("the daemon does not serve its images")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def stage(device: Path, models: Path, names: Iterable[str]) -> None:
    for words in (
        ["format", device],
        *(["stage", models / name, "--device", device, "--model", name] for name in names),
    ):
        subprocess.run(
            [sys.executable, "-m", "tierd.cli", *map(str, words)], cwd=ROOT, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip


# --- engines -------------------------------------------------------------------------------------


class Engine:
    """A process of bench.vllm_on_gpu.engine; asked from any thread, one question at a time."""

    def __init__(
        self, model: str, kind: str, asked: argparse.Namespace, socket: Path, cores: set[int]
    ) -> None:
        self.name = f"{model} {kind}"
        read, write = os.pipe()
        served = {
            "TIERD": "1", "TIERD_SOCKET": str(socket), "TIERD_WAIT_S": "60",
            "TIERD_CACHE_ROWS": str(CACHES.get(kind, 0)),
        }  # fmt: skip
        environ = {
            **os.environ,
            "PYTHONPATH": f"{asked.site}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "TIERD_BENCH_ANSWERS": str(write),
            **({"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if model.startswith("engram") else {}),
            **(served if kind in CACHES else {}),
        }
        self.log = asked.logs / f"{model}-{kind}.log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.vllm_on_gpu.engine", str(asked.models / model)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=self.log.open("w"),
            stderr=subprocess.STDOUT, text=True, pass_fds=[write], env=environ,
        )  # fmt: skip
        os.close(write)
        os.sched_setaffinity(self._process.pid, cores)  # before it has other threads
        self._answers = os.fdopen(read)

    def answer(self, timeout_s: float = 2 * TIMEOUT_S) -> Any:
        ready = select.select([self._answers], [], [], timeout_s)[0]
        line = self._answers.readline() if ready else ""
        if not line:
            what = "ended" if ready else "hangs"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20 if ready else 0)
            raise SystemExit(f"{self.name} {what}:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, what: str, **asked: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **asked}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def shares_of_cores(count: int) -> Iterator[set[int]]:
    """Cores for so many processes, each with its own; all of them where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    for number in range(count):
        yield set(cores[number * each : (number + 1) * each] or cores)


def side_by_side(work: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Do several things at once; the first failure is everybody's."""
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            results[name] = work[name]()
        except SystemExit as error:
            results[name] = error

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results.values():
        if isinstance(found, SystemExit):
            raise found
    return results


def tokens_differing(made: list[list[int]], right: list[list[int]]) -> int:
    pairs = zip(itertools.chain(*made), itertools.chain(*right), strict=True)
    return sum(a != b for a, b in pairs)


def random_prompts(seed: int, count: int, longest: int = 140) -> list[list[int]]:
    chosen = random.Random(seed)
    return [
        [chosen.randrange(3, 512) for _ in range(chosen.randint(4, longest))] for _ in range(count)
    ]


# --- measures ------------------------------------------------------------------------------------


class Trial:
    """The engines of all models and what is done with them."""

    def __init__(self, engines: dict[str, dict[str, Engine]], daemon: Daemon) -> None:
        self.engines = engines
        self.daemon = daemon
        self.prompts = random_prompts(5, PROMPTS)
        self.tokens: dict[str, list[list[int]]] = {}  # the stock engines'

    def each(self, kinds: tuple[str, ...], what: str, **asked: Any) -> dict[str, Any]:
        return side_by_side(
            {
                f"{model} {kind}": lambda e=self.engines[model][kind]: e.ask(what, **asked)
                for model in self.engines
                for kind in kinds
            }
        )

    def compare(self) -> dict[str, Any]:
        found = self.each(("stock", *CACHES), "one_by_one", prompts=self.prompts, tokens=TOKENS)
        compared = differing = 0
        for model in self.engines:
            self.tokens[model] = found[f"{model} stock"]["tokens"]
            for kind in CACHES:
                made = found[f"{model} {kind}"]["tokens"]
                differing += tokens_differing(made, self.tokens[model])
                compared += len(made)
        distinct = {m: len(set(itertools.chain(*made))) for m, made in self.tokens.items()}
        return {"prompts": compared, "tokens_differing": differing, "distinct_tokens": distinct}

    def time(self) -> dict[str, Any]:
        """Engines take turns, one running at a time; the first round does not count.

        What a shared host adds to a step comes in bursts and never takes any time away, so the
        tenth of all steps that it disturbed least is compared; the medians stand beside it.
        """
        batch = random_prompts(6, BATCH, 32)
        found: dict[str, Any] = {}
        for model, engines in self.engines.items():
            steps: dict[str, list[float]] = {kind: [] for kind in engines}
            rounds: dict[str, list[float]] = {kind: [] for kind in engines}
            for turn in range(ROUNDS + 1):
                for kind in itertools.islice(itertools.cycle(engines), turn, turn + len(engines)):
                    made = engines[kind].ask("timed", prompts=batch, tokens=TIMED_TOKENS)
                    if turn:
                        steps[kind] += made["steps_us"]
                        rounds[kind].append(made["tpot_us"])
            deciles = {kind: statistics.quantiles(one, n=10) for kind, one in steps.items()}
            found[model] = {"stock_us": deciles["stock"][0], "deciles_us": deciles}
            found[model]["gpu"] = {
                kind: engine.ask("gaps", prompts=batch, tokens=TRACED_TOKENS)
                for kind, engine in engines.items()
            }
            for kind in CACHES:
                pairs = zip(rounds[kind], rounds["stock"], strict=True)
                shares = [100 * (mine / stock - 1) for mine, stock in pairs]
                found[model] |= {
                    f"{kind}_us": deciles[kind][0],
                    f"{kind}_pct": 100 * (deciles[kind][0] / deciles["stock"][0] - 1),
                    f"{kind}_median_pct": 100 * (deciles[kind][4] / deciles["stock"][4] - 1),
                    f"{kind}_quartiles": statistics.quantiles(shares, n=4),
                }
        return found

    def kill(self) -> dict[str, Any]:
        """Kill daemons while the engines with little cache generate."""
        stop = threading.Event()
        seen = {"prompts": 0, "tokens_differing": 0, "hangs": 0, "longest_s": 0.0}

        def generate(model: str) -> None:
            at = 0
            while not stop.is_set():
                at = (at + CHUNK) % (PROMPTS - CHUNK)
                asked = self.prompts[at : at + CHUNK]
                made = self.engines[model]["cold"].ask("one_by_one", prompts=asked, tokens=TOKENS)
                right = self.tokens[model][at : at + CHUNK]
                seen["prompts"] += CHUNK
                seen["tokens_differing"] += tokens_differing(made["tokens"], right)
                seen["longest_s"] = max(seen["longest_s"], made["longest_s"])
                seen["hangs"] += made["longest_s"] > TIMEOUT_S

        chosen = random.Random(7)

        def kill() -> int:
            try:
                for _ in range(KILLS):
                    time.sleep(chosen.uniform(0.0, 0.5))
                    self.daemon.kill()
                    time.sleep(chosen.uniform(0.0, 0.3))
                    self.daemon.start()
                    self.daemon.wait()
            finally:
                stop.set()
            return KILLS

        work: dict[str, Any] = {m: lambda m=m: generate(m) for m in self.engines}
        return {"kills": side_by_side({**work, "kills": kill})["kills"], **seen}

    def zero(self) -> dict[str, Any]:
        """Zero the stock tables and count the prompts whose tokens change."""
        self.each(("stock",), "zero")
        asked = self.prompts[:ZEROED]
        found = self.each(("stock",), "one_by_one", prompts=asked, tokens=TOKENS)
        return {
            model: sum(
                a != b
                for a, b in zip(found[f"{model} stock"]["tokens"], self.tokens[model], strict=False)
            )
            for model in self.engines
        }


def machine() -> str:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return f"{found or 'no GPU'}, {os.cpu_count()} cores, Linux {os.uname().release}"


def play(asked: argparse.Namespace, directory: Path) -> dict[str, Any]:
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine()}

    def part(name: str, result: Any) -> None:
        found[name] = result
        found[f"{name}_at_s"] = round(time.monotonic() - began, 1)
        print(name, json.dumps(result)[:700], found[f"{name}_at_s"], flush=True)
        if asked.out:  # what there is, should the next part fail
            asked.out.write_text(json.dumps(found) + "\n")

    image = directory / "device.img"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    with contextlib.ExitStack() as stack:
        device, kind = stack.enter_context(loop_device(image))
        found["device"] = kind
        cores = shares_of_cores(len(asked.only) * (1 + len(CACHES)) + 1)
        engines = {
            model: {
                name: Engine(model, name, asked, directory / "engine.sock", next(cores))
                for name in ("stock", *CACHES)
            }
            for model in asked.only
        }
        every = [engine for kinds in engines.values() for engine in kinds.values()]
        for engine in every:
            stack.callback(engine.close)
        stage(device, asked.models, asked.only)
        daemon = Daemon(directory, device, next(cores))
        stack.callback(daemon.kill)
        daemon.wait(2 * len(asked.only))
        part("daemon", "serves")
        started = {}
        for name, kinds in list(engines.items()):
            try:
                started |= side_by_side({one.name: one.answer for one in kinds.values()})
            except SystemExit as error:
                print(error, flush=True)
                found[f"{name} failed"] = str(error)[-300:]
                del engines[name]
        part("engines", started)
        trial = Trial(engines, daemon)
        if asked.timed:
            part("timed", trial.time())
            return found
        part("compared", trial.compare())
        part("killed", trial.kill())
        part("counters", trial.each(tuple(CACHES), "counters"))
        part("zeroed", trial.zero())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_vllm")
    parser.add_argument("--models", type=Path, required=True, help="made by .checkpoints")
    parser.add_argument("--site", type=Path, required=True, help="made by .unpack")
    parser.add_argument("--only", nargs="*", choices=[*MODELS, *DEEP])
    parser.add_argument("--timed", action="store_true", help="take times, of the deep models")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.only = asked.only or list(DEEP if asked.timed else MODELS)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        line = json.dumps(play(asked, Path(name)))
    print(line)
    if asked.out:
        asked.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
