"""Plant one small mistake after another in the code that decides proofs, and see whether the tests notice.

    python tests/mutants/run.py --sample 12                     twelve mutants of every module, the same ones every time
    python tests/mutants/run.py --module defenses/evidence.py --sample 0 every mutant of one module

A mutant is one change of the syntax tree: a comparison turned, a number moved by one, `min` for `max`, `lower` for
`upper`, `and` for `or`, a branch or a check removed, two arguments swapped. Each runs in a process of its own, forked
once torch and pytest are loaded, on a copy of the package, against the test files of its module, quick tests first,
until one fails or takes far longer than it should. Mutants that tests/MUTANTS.md explains are not run; any other
survivor makes the exit status 1.
"""

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

from operators import Mutant, explained, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "patchguard"
EXPLAINED = ROOT / "tests" / "MUTANTS.md"
LOADED = ("torch", "numpy", "PIL.Image", "hypothesis", "beartype", "jaxtyping", "pytest", "torch.export", "safetensors")
MEMORY = 12 * 2**30  # bytes of address space that a mutant may take
PATIENCE = 4.0  # times a test's own time, after 20 seconds, before a mutant that does not end counts as noticed

BOUNDS = ["defenses/test_exhaustive.py", "defenses/test_laws.py"]
SUMS = ["defenses/test_window_sums.py", "defenses/test_exhaustive.py"]
RULES = [
    "geometry/rules/test_pointwise.py",
    "geometry/rules/test_pointwise_channels.py",
    "geometry/rules/test_random_networks.py",
]
TESTS = {
    "defenses/base.py": [*BOUNDS, "defenses/test_robust_masking.py", "defenses/test_double_masking.py"],
    "defenses/cell_masking.py": [*BOUNDS, "defenses/test_ranks.py"],
    "defenses/clipped_sum.py": [*BOUNDS, "defenses/test_sums.py", "defenses/test_several_patches.py"],
    "defenses/double_masking.py": [*BOUNDS, "defenses/test_double_masking.py"],
    "defenses/majority_vote.py": [*BOUNDS, "defenses/test_sums.py"],
    "defenses/masked_agreement.py": [*BOUNDS, "defenses/test_double_masking.py"],
    "defenses/order_statistics.py": [*BOUNDS, "defenses/test_ranks.py"],
    "defenses/robust_masking.py": [*BOUNDS, "defenses/test_robust_masking.py"],
    "defenses/undefended.py": [*BOUNDS, "defenses/test_sums.py"],
    "defenses/evidence.py": ["defenses/test_evidence.py", "defenses/test_exhaustive.py"],
    "geometry/windows.py": ["geometry/test_windows.py", "geometry/test_field.py", *SUMS],
    "defenses/window_sums.py": SUMS,
    "defenses/window_products.py": SUMS,
    "defenses/ties.py": ["defenses/test_ties.py"],
    "geometry/field.py": ["geometry/test_field.py", "geometry/test_preprocess.py"],
    "geometry/mask_sets.py": ["geometry/test_mask_sets.py", "guards/test_pixel_masks.py"],
    "geometry/preprocess.py": ["geometry/test_preprocess.py"],
    "geometry/resize.py": ["geometry/test_preprocess.py"],
    "geometry/rules/layout.py": [*RULES, "geometry/rules/test_layout.py", "geometry/rules/test_neighborhood.py"],
    "geometry/rules/pointwise.py": RULES,
    "geometry/rules/neighborhood.py": [
        *RULES,
        "geometry/rules/test_convolution.py",
        "geometry/rules/test_neighborhood.py",
        "geometry/rules/test_upsampling.py",
    ],
    "geometry/trace.py": ["geometry/test_trace_shapes.py", "geometry/test_trace.py", "geometry/test_program.py"],
    "verify.py": ["test_verify.py", "test_verify_mutants.py", "test_toy_guard.py"],
    "guard.py": ["guards/test_contract.py", "guards/test_interval.py", "guards/test_local.py", "test_toy_guard.py"],
    "guards/local.py": ["guards/test_local_sizes.py", "guards/test_local_labels.py", "guards/test_local.py"],
    "guards/mask_rounds.py": ["guards/test_mask_rounds.py", "guards/test_pixel_masks.py"],
    "guards/pixel_masks.py": ["guards/test_mask_rounds.py", "guards/test_pixel_masks.py"],
    "guards/cell_claims.py": ["storage/test_certificate_file.py"],
    "storage/certificate_file.py": ["storage/test_certificate_file.py"],
}


class QuickFirst:
    """A pytest plugin: runs the quickest tests first, ends what hangs, and notes how long unknown tests take."""

    def __init__(self, times: Path) -> None:
        self.times, self.noted = times, Counter[str]()
        self.known: dict[str, float] = json.loads(times.read_text()) if times.exists() else {}

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: self.known.get(item.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(round(20 + PATIENCE * self.known.get(nodeid, 900.0)))

    def pytest_runtest_logreport(self, report) -> None:
        self.noted[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self.noted.keys() <= self.known.keys():
            self.times.write_text(json.dumps({**self.known, **self.noted}))


def start(tests: list[str], copy: Path, *, planted: bool) -> int:
    """Fork a process that runs the tests on a copy of the package; its exit status is pytest's."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    status = 99
    try:
        import pytest
        from hypothesis import Phase, settings

        sys.dont_write_bytecode = planted  # what is compiled from a mutant must not outlive it
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        phases = [Phase.explicit, Phase.generate]  # an example that fails need not be a small one
        settings.register_profile("mutants", database=None, deadline=None, derandomize=True, phases=phases)
        loaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported already
        options = [*loaded, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutants"]
        plugin = QuickFirst(copy.parent / "times.json")
        signal.alarm(120)  # until the first test starts
        status = int(pytest.main([*options, *(f"tests/{name}" for name in tests)], plugins=[plugin]))
        if not Path(sys.modules["patchguard"].__file__ or "").is_relative_to(copy):
            print("the tests ran another copy of the package")
            status = 99
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(child: int, wait: bool) -> int | None:
    """Return the exit status of a process, or None while it runs; what it started ends with it."""
    done, status = os.waitpid(child, 0 if wait else os.WNOHANG)
    if not done:
        return None
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def prepare(modules: list[str], folder: Path, jobs: int) -> list[Path]:
    """Return copies of the package, compiled; all the tests must pass on it, and how long each takes is noted."""
    copies = [folder / str(number) for number in range(jobs)]
    shutil.copytree(PACKAGE, copies[0] / "patchguard", ignore=shutil.ignore_patterns("__pycache__"))
    for tests in dict.fromkeys(name for module in modules for name in TESTS[module]):
        if ended(start([tests], copies[0], planted=False), wait=True) != 0:
            raise SystemExit(f"{(copies[0] / 'log').read_text()}tests/{tests} fails on the package as it is")
    for copy in copies[1:]:
        shutil.copytree(copies[0], copy)
    return copies


def survivors_of(module: str, chosen: list[Mutant], copies: list[Path], log: Path | None) -> list[Mutant]:
    """Return the mutants that the tests of their module do not notice; `log` takes one line of JSON per mutant."""
    waiting, survivors = list(enumerate(chosen))[::-1], []
    running: dict[Path, tuple[Mutant, int, float]] = {}
    while waiting or running:
        for copy in copies:
            if copy not in running and waiting:
                number, mutant = waiting.pop()
                target = copy / "patchguard" / module
                target.write_text(mutant.source)
                os.utime(target, (number, number))  # a time of its own: no compiled file is taken for this one
                running[copy] = mutant, start(TESTS[module], copy, planted=True), time.monotonic()
        for copy, (mutant, child, began) in list(running.items()):
            status = ended(child, wait=False)
            if status is None:
                continue
            del running[copy]
            shutil.copy2(PACKAGE / module, copy / "patchguard" / module)
            if log is not None:
                row = {"mutant": mutant.key, "noticed": status != 0, "status": status}
                with log.open("a") as file:
                    file.write(json.dumps({**row, "seconds": round(time.monotonic() - began, 1)}) + "\n")
            if status == 0:
                survivors.append(mutant)
            elif status in (3, 4, 5, 99):  # pytest itself failed
                raise SystemExit(f"{(copy / 'log').read_text()}the tests of {module} could not be run: {status}")
        time.sleep(0.02)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=list(TESTS), help="only this module; may be repeated")
    parser.add_argument("--sample", type=int, default=12, help="mutants per module; 0 takes all (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tested at a time")
    parser.add_argument("--log", type=Path, help="a file that gets one line of JSON per mutant, at its end")
    parser.add_argument("--list", action="store_true", help="name the mutants, run nothing")
    settings = parser.parse_args()
    os.chdir(ROOT)
    known, total, equal, unknown = explained(EXPLAINED.read_text()), 0, 0, 0
    modules = {module: mutants_of(module, (PACKAGE / module).read_text()) for module in settings.module or TESTS}
    stale = {key for key in known if key[0] in modules and key not in {mutant.key for mutant in modules[key[0]]}}
    for module, function, before, after in sorted(stale):
        print(f"MUTANTS.md explains what is no mutant: {module} {function}: `{before}` -> `{after}`")
    for module, every in modules.items():
        count = min(settings.sample or len(every), len(every))
        modules[module] = random.Random(f"{settings.seed} {module}").sample(every, count)
    if settings.list:
        for mutant in (mutant for chosen in modules.values() for mutant in chosen):
            print(f"{mutant.module} {mutant}")
        return 0
    os.environ.update(OMP_NUM_THREADS="1")
    for name in LOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as name:
        copies = prepare(list(modules), Path(name), settings.jobs)
        for module, chosen in modules.items():
            open_ones = [mutant for mutant in chosen if mutant.key not in known]
            survivors = survivors_of(module, open_ones, copies, settings.log)
            total, equal = total + len(chosen), equal + len(chosen) - len(open_ones)
            unknown += len(survivors)
            print(f"{module}: {len(open_ones) - len(survivors)} of {len(chosen)} noticed, "
                  f"{len(chosen) - len(open_ones)} explained, {len(survivors)} unexplained")  # fmt: skip
            for mutant in survivors:
                print(f"  {mutant}")
            sys.stdout.flush()
    noticed = total - equal - unknown
    print(f"{noticed} of {total} mutants noticed ({noticed / total:.1%}), {equal} explained, {unknown} unexplained")
    return 1 if unknown or stale else 0


if __name__ == "__main__":
    sys.exit(main())
