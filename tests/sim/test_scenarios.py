"""Every story of `scenarios/` is told again, and must read the same.

`WALTZ_TELL_ANEW=1` writes down what is told now; whoever does that reads what has changed.
"""

import os
from pathlib import Path

import pytest

from waltz_core.sim.scenario import stories_in, told_again

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
TOLD = [
    pytest.param(story, id=f"{path.stem}: {story.title}")
    for path in FILES
    for story in stories_in(path.read_text(encoding="utf-8"))[1]
]
IS_TOLD_ANEW = "WALTZ_TELL_ANEW" in os.environ


@pytest.mark.skipif(IS_TOLD_ANEW, reason="the stories are written down anew")
@pytest.mark.parametrize("story", TOLD)
def test_story(story):
    assert told_again(story).text == story.text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_has_one_form(path):
    text = path.read_text(encoding="utf-8")
    intro, stories = stories_in(text)
    if IS_TOLD_ANEW:
        stories = [told_again(each) for each in stories]
    written = intro + "\n".join(each.text for each in stories)
    if IS_TOLD_ANEW:
        path.write_text(written, encoding="utf-8")
    assert written == text or IS_TOLD_ANEW
    assert len({each.title for each in stories}) == len(stories)
