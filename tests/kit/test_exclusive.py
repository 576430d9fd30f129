"""One run a folder, and enough open files."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys

import pytest
from kit_toy import Resolved
from moeref_conformance import cli
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.run import machinery
from moeref_conformance.run.exclusive import exclusive
from moeref_conformance.run.open_files import allow_open_files

pytestmark = pytest.mark.cpu
TP2 = "qwen3_moe/tp2/gloo"


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machinery, "_rank_world", lambda settings, *_: Resolved(settings.target))
    arguments = ["run", "--target", "kit_toy:target", "--matrix", "cpu", "--cell", TP2, "--out", str(tmp_path / "out")]
    with exclusive([tmp_path / "out", tmp_path / "out"]):
        assert cli.main(arguments) == 2
    assert "another run is writing there; wait for it, or name another folder" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_dead_run_holds_no_folder(tmp_path):
    program = (
        "import os, sys, pathlib\n"
        "from moeref_conformance.run.exclusive import exclusive\n"
        "held = exclusive([pathlib.Path(sys.argv[1])])\nheld.__enter__()\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(BadInput, match="another run"), exclusive([tmp_path]):
            pass
        other.kill()
        other.wait()
        with exclusive([tmp_path]):
            pass


def test_only_a_file_system_without_locks_is_written_to_unlocked(tmp_path, monkeypatch):
    def answers(number):
        def flock(descriptor, how):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    for number in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
        answers(number)
        with exclusive([tmp_path]):
            pass
    answers(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), exclusive([tmp_path]):
        pass


def test_a_low_limit_of_open_files_is_raised_or_named(monkeypatch):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
    for limits in ((64, 4096), (1024, 4096), (64, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda what, limits=limits: limits)
        allow_open_files()
    assert given == [(512, 4096), (512, resource.RLIM_INFINITY)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 128))
    with pytest.raises(BadInput, match=r"may open 128 files here, and a run needs 512: raise the hard limit"):
        allow_open_files()
