"""A process's names for files mean what they mean to it, and none of them harms the agent."""

import os
from pathlib import Path

import pytest

from agents.rooted_files import read_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("of the node")
    root = tmp_path / "root"
    (root / "etc/deep").mkdir(parents=True)
    (root / "etc/own").write_text("of the process")
    return root


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ({}, "/etc/own"),
        ({}, "etc/../etc/./deep/..//own"),
        ({}, "/../../../etc/own"),
        ({"etc/link": "own"}, "/etc/link"),
        ({"etc/link": "/etc/own"}, "/etc/link"),
        ({"etc/link": "/other/own", "other": "etc"}, "/etc/link"),
        ({"etc/deep/up": "../../../../.."}, "/etc/deep/up/etc/own"),
    ],
)
def test_names_and_links_are_followed_within_the_root(root: Path, links: dict[str, str], name: str) -> None:
    for link, target in links.items():
        (root / link).symlink_to(target)
    assert read_below(root, name, 1000) == b"of the process"
    assert read_below(root, name, 2) == b"of"


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    (root.parent / "linked").symlink_to(root)
    assert read_below(root.parent / "linked", "etc/own", 1000) == b"of the process"


@pytest.mark.parametrize("target", ["{root}/../secret", "../../secret", "/secret", "/proc/1/root/secret", "link"])
def test_a_link_that_leaves_the_root_leads_nowhere(root: Path, target: str) -> None:
    (root / "etc/link").symlink_to(target.format(root=root))
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"No such file|Too many levels"):
        read_below(root, "/etc/link", 1000)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_what_is_no_regular_file_is_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "etc/pipe")
    (root / "etc/link").symlink_to("pipe")
    for name in ("etc/pipe", "etc/link", "etc", ""):
        with pytest.raises(OSError, match="not a regular file"):
            read_below(root, name, 1000)
