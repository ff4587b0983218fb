"""The scrub: a few blocks at a time, going on after every restart where it was last saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.model import Violation
from tierd.io import scrub

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sim.world import World

STEPS_MAX = 12
SAVE_SHARE = 0.4  # of the steps are followed by a save
PASS_STEPS_MAX = 1000


def begin(folder: Path, sets: int) -> list[scrub.Scrub]:
    """Make a scrub of each set, as a daemon does that starts: with what was last saved."""
    found = []
    for number in range(sets):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        found.append(scrub.Scrub(place))
    return found


def scrub_on(world: World) -> None:
    """Scrub some blocks of a set."""
    number = world.chance.randrange(len(world.models))
    for _ in range(world.chance.randint(1, STEPS_MAX)):
        if step(world, number) is None:
            return
        if world.chance.random() < SAVE_SHARE:
            world.scrubs[number].save()


def whole_pass(world: World, number: int) -> None:
    """Without faults: to the end of the pass, and one more; then it knows exactly what is bad."""
    walker, model, stores = world.scrubs[number], world.models[number], world.stores(number)
    for _ in range(2):
        for _ in range(PASS_STEPS_MAX):
            done = step(world, number)
            if done is None or done.pass_done:
                break
        else:
            raise Violation("hang", f"set {number}: a scrub does not come to its end")
    wrong = {
        name: set(world.wrong_pages(stores.image(name), known))
        for name, known in model.state.images.items()
    }
    bad = {name: set(pages) for name, pages in walker.bad.items()}
    for name, pages in wrong.items():
        if len(pages) <= scrub.BAD_PAGES_KEPT and bad.get(name, set()) != pages:
            raise Violation("silence", f"{name}: {sorted(pages)} are bad, the scrub has {bad}")


def step(world: World, number: int) -> scrub.Step | None:
    """One block; what it finds must be what is wrong there, unless faults came in between."""
    stores, walker = world.stores(number), world.scrubs[number]
    before = world.faults_so_far()
    done = walker.step(stores.images, 1.0)
    if done is None or not done.image:  # there is nothing, or nothing is left of this pass
        return done
    found = sorted(finding.page for finding in done.findings)
    world.log(f"scrub {done.image}: {done.pages} pages, {found}")
    if -1 in found:
        raise Violation("silence", f"{done.image}: scrubbed whole, and yet another digest")
    end = stores.image(done.image).info.pages if done.image_done else walker.next_page
    if world.faults_so_far() == before:
        known = world.models[number].state.images[done.image]
        wrong = world.wrong_pages(stores.image(done.image), known)
        here = [page for page in wrong if end - done.pages <= page < end]
        if found != here:
            raise Violation("silence", f"{done.image}: {here} are bad, the scrub found {found}")
    return done
