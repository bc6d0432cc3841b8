"""Storages that forget a sync, or make it too late, and what shows that they do.

A sync is known by its site, the calls that lead to it. Left out, or made behind the next one, some
crash has to show it: else nobody needs it, or the matrix does not see what it is for.
"""

from collections import defaultdict
from random import Random

from tests.crash.matrix import Violation, points, power_losses, started_again, used
from tests.crash.stories import STORIES, first_start, site
from waltz_core.sim.crash import AnyOf, Keep, RecordingDisk, delayed, sync_places, without

KILLS_OF_A_STORY = 12
LOSSES_OF_A_STORY = 12
TRIES = 4
MUTATIONS = {"forgotten": without, "made late": delayed}


def runs(matrix):
    """Every story, and what follows where some of them are killed or lose power."""
    for make in STORIES:
        story = make()
        changes = story.disk.changes
        yield make.__name__, changes, story.begin
        rng = Random(make.__name__)
        every = [(place, told) for place, _, told in points(changes, story.begin)]
        kills = every if make is first_start else rng.sample(every, KILLS_OF_A_STORY)
        for place, told in kills:
            after = started_again(matrix, changes[:place], told, f"killed after change {place}")
            yield f"{make.__name__} killed after {place}", after.disk.changes, place + 1
        lost = rng.sample(range(len(every)), LOSSES_OF_A_STORY)
        for number, (place, platter, told) in enumerate(points(changes, story.begin)):
            if number in lost:
                disk = RecordingDisk.after_power_loss(platter.image(AnyOf(rng)), site)
                begin = len(disk.changes) + 1
                where = f"{make.__name__} without power after {place}"
                yield where, used(matrix, disk, told, where).disk.changes, begin


def occurrences(matrix):
    """Where each site is: (site, mutation) -> runs and places."""
    found = defaultdict(list)
    for name, changes, begin in runs(matrix):
        for place in sync_places(changes):
            if place >= begin:
                for mutation in MUTATIONS:
                    found[changes[place].site, mutation].append((name, changes, place))
    return found


def shown(matrix, mutation, places):
    """Return what shows a mutation in some run, None if nothing does."""
    rng = Random(mutation)
    quick = rng.sample(places, min(TRIES, len(places)))
    # What was told and is not there shows by itself; for the rest more has to be tried.
    for tries, keeps in ((places, (Keep(),)), (quick, None)):
        for name, changes, place in tries:
            mutated = MUTATIONS[mutation](changes, place)
            if mutated is None:
                continue
            try:
                matrix.name = name
                power_losses(matrix, mutated, place, keeps=keeps, only_told=keeps is not None)
            except Violation as error:
                return str(error)
    return None
