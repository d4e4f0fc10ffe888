"""Goal: the simulation finds bugs. Every planted bug is found, so a green run means something.

Method: each tests/planted/*.patch is one realistic bug (an ack before its sync, a directory that is not synced, a
reply of a dead worker, …). It is applied to a copy of the tree, and a simulation (of the whole server, with few
exceptions) runs there with the seed that is known to find it. If that run has changed, further seeds are tried:
slower, but as good. `scripts/planted NAME` searches from seed 0 and stores the seed. A normal run looks for a few
bugs, `--long` for all.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.planted.runner import (
    ROOT,
    Bug,
    DoesNotApply,
    all_bugs,
    find_again,
    planted,
    read_bug,
    simulate,
    write_seed,
)
from tests.support.length import is_long, pick, turn

pytestmark = pytest.mark.sim

BUGS = all_bugs()
FEWEST_BUGS = 40
FEWEST_OF_THE_SERVER = 30  # found by the simulation of the whole server
EACH = 16  # of this many, one is looked for


@pytest.mark.parametrize("bug", BUGS if is_long() else BUGS[turn(EACH) :: EACH], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert bug.seed is not None, f"no seed that finds it is stored; run scripts/planted {bug.name}"
    assert find_again(bug) is not None, (
        f"{bug.breaks} Seed {bug.seed} of the {bug.sim} simulation and those after it do not find it any more; "
        f"run scripts/planted {bug.name}"
    )


def test_every_patch_applies() -> None:
    """Including those that are not in the sample."""
    for bug in BUGS:
        command = ["git", "apply", "--check", str(bug.path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{bug.path.name} no longer applies; recreate it for the current code:\n{done.stderr}"
        )


def test_there_are_enough_bugs() -> None:
    assert len(BUGS) >= FEWEST_BUGS
    assert sum(bug.sim == "server" for bug in BUGS) >= FEWEST_OF_THE_SERVER
    assert len({bug.breaks for bug in BUGS}) == len(BUGS), "two patches say that they break the same"


def test_a_patch_that_does_not_apply_says_so(tmp_path: Path) -> None:
    path = tmp_path / "stale.patch"
    path.write_text(
        "Breaks: nothing.\n\n--- a/topics/system/process.py\n+++ b/topics/system/process.py\n@@ -1,1 +1,1 @@\n-no such line\n+x\n"
    )
    with (
        pytest.raises(DoesNotApply, match=r"stale\.patch no longer applies; recreate it"),
        planted(read_bug(path)),
    ):
        pass


def test_a_seed_is_written_into_the_patch_and_the_patch_still_applies(tmp_path: Path) -> None:
    path = tmp_path / BUGS[0].path.name
    shutil.copy2(BUGS[0].path, path)
    for seed in (3, 41):
        write_seed(read_bug(path), "server", seed)
        assert read_bug(path).seed == seed
        assert path.read_text().count("seed:") == 1
    with planted(read_bug(path)):
        pass


def test_the_tree_without_a_bug_is_not_accused(tmp_path: Path) -> None:
    """A simulation that always fails would find every bug."""
    path = tmp_path / "harmless.patch"
    name = "topics/engine/core/ports.py"
    first, second, third, *_ = (ROOT / name).read_text().splitlines()
    context = f" {first}\n {second}\n {third}\n"
    path.write_text(
        f"Breaks: nothing. A blank line is all that it adds.\n\n--- a/{name}\n+++ b/{name}\n@@ -1,3 +1,4 @@\n+\n{context}"
    )
    with planted(read_bug(path)) as tree:
        assert simulate(tree, "server", 0, pick(short=1, long=4)) is None
