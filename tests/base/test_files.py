"""Reading names the line of an error; writing is atomic; a locked folder is refused to other processes."""

import errno
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepjepa.base import files
from stepjepa.base.errors import UserError
from stepjepa.base.files import (
    append_jsonl,
    atomic_write,
    check_output_file,
    check_writable,
    claimed_output,
    existing_file,
    locked,
    naming_disk_errors,
    read_json_object,
    read_jsonl,
    read_yaml,
)
from stepjepa.store.folder import open_run_folder


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"a": \xff}', "not UTF-8 text"),
        (b"\x1f\x8b\x08", "not UTF-8 text"),
        (b'{"a": 1', "not valid JSON (Expecting ',' delimiter at column 8)"),
        (b"[1]", "a JSON list where an object is needed"),
        (b'{"a": "\\ud800"}', "half of a character"),
        (b'{"a": 1, "b": [{"c": 1, "d": 2, "c": 1}]}', "has the key 'c' twice in one object; keep one of the two"),
        (b'{"a\\u000a": 1, "a\\n": "\\ud800"}', "has the key 'a\\n' twice"),
        (b'{"a":' * 10**5, "nested too deeply; write it with fewer levels"),
        (b'{"a": ' + b"1" * 5000 + b"}", "holds a number of thousands of digits; write it as a text"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n' + line + b'\n{"a": "\\ud83d\\ude00"}')
    errors: list[UserError] = []
    result = list(read_jsonl(path, on_error=errors.append))
    assert result == [(1, {"a": 1}), (4, {"a": "\U0001f600"})]
    assert len(errors) == 1 and str(errors[0]).startswith(f"{path}:3: ") and told in str(errors[0])
    with pytest.raises(UserError, match=r"data\.jsonl:3: "):
        list(read_jsonl(path))


def test_files_that_were_put_together_have_several_byte_order_marks(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n' * 2)
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (2, {"a": 1})]


def test_numbers_know_how_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1.10, "b": 1E5, "c": 7, "d": NaN}')
    ((_, row),) = read_jsonl(path)
    assert (row["a"], row["b"], row["c"]) == (1.1, 1e5, 7)
    again = pickle.loads(pickle.dumps(row))
    assert (again["a"].text, again["b"].text) == ("1.10", "1E5") and math.isnan(again["d"])
    assert json.dumps(again) == '{"a": 1.1, "b": 100000.0, "c": 7, "d": NaN}'


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1', "\ud800"])
def test_a_damaged_json_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"a\.json.* is damaged: .*; restore it"):
        read_json_object(path, "file", "restore it")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: [1\n", "yaml:3: not valid YAML"),
        ("a: 1\na: 2", "yaml:2: not valid YAML .the key 'a' occurs twice"),
        ("a: !!python/object/apply:os.getcwd []", "yaml:1: not valid YAML"),
        ("a: !!timestamp 2026-99-99", "not valid YAML"),
    ],
)
def test_yaml_is_read_safely(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=told):
        read_yaml(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("a: no\nb: true\nc: on\nd: 1")
    assert read_yaml(tmp_path / "a.yaml") == {"a": "no", "b": True, "c": "on", "d": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("007", 7),
        ("010", 10),
        ("1_000", 1000),
        ("0x1F", 31),
        ("-0b101", -5),
        ("+5", 5),
        ("1.10", 1.1),
        ("-.Inf", -math.inf),
    ],
)
def test_numbers_of_yaml_know_how_they_are_written(text: str, value: float, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}")
    read = read_yaml(tmp_path / "a.yaml")["a"]
    assert (read, read.text) == (value, text)
    assert pickle.loads(pickle.dumps(read)).text == text
    assert json.dumps(read) == json.dumps(value)


@pytest.mark.parametrize("text", ["2026-11-27", "2026-99-99", "12:30", "1:30:00.5", "1__0", "0x"])
def test_a_text_of_yaml_is_no_date_and_no_number_of_yaml_1_1(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}")
    assert read_yaml(tmp_path / "a.yaml") == {"a": text}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with atomic_write(path) as stream:
        stream.write("old –")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as stream:
        stream.write("new")
        raise KeyboardInterrupt
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]
    assert path.read_text(encoding="utf-8") == "old –"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470"),
    ],
)
def test_disk_errors_name_the_file(error: Exception) -> None:
    with pytest.raises(OSError) as result, naming_disk_errors("a.pt"):
        raise error
    assert result.value.filename == "a.pt"
    with pytest.raises(RuntimeError, match="shapes"), naming_disk_errors("a.pt"):
        raise RuntimeError("shapes")


@pytest.mark.parametrize(("free", "number"), [(1000, errno.ENOSPC), (2**30, errno.EIO)])
def test_a_writer_that_gives_no_reason_has_met_a_full_disk_if_none_is_free(
    free: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free))
    with pytest.raises(OSError) as result, naming_disk_errors(tmp_path / "later" / "a.pt"):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed writing file")
    assert (result.value.errno, asked) == (number, [tmp_path])


def test_lines_that_can_not_all_be_written_leave_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_jsonl(path, [{"a": "ä"}])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            append_jsonl(path, [{"b": 1}, {"b": 2}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (path.read_bytes(), error.value.filename) == (before, str(path))
    append_jsonl(path, [{"b": 1}, {"b": 2}])
    assert [value for _, value in read_jsonl(path)] == [{"a": "ä"}, {"b": 1}, {"b": 2}]


def test_an_error_names_the_file_and_not_its_temporary_one() -> None:
    with pytest.raises(OSError) as error, atomic_write("/proc/a.txt"):
        pass
    assert error.value.filename == "/proc/a.txt"


def test_a_place_that_can_not_be_written_to_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and Path(path).exists())
    with pytest.raises(UserError, match=rf"{tmp_path}/run: can't be written to; name another place"):
        check_writable(tmp_path / "run")
    since = f"can't be written to, since {tmp_path} is read-only for you; name another place"
    for check in (check_output_file, lambda path: open_run_folder(str(path), None)):
        with pytest.raises(UserError, match=f"{tmp_path}/new/a: {since}"):
            check(tmp_path / "new" / "a")


HOLD = "import sys, time; from pathlib import Path; from stepjepa.base.files import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_second_process_is_told_who_holds_the_lock_and_a_kill_frees_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        message = rf"is in use by process {first.pid} on "
        with pytest.raises(UserError, match=message), locked(folder, patience=0):
            pass
        # Another user of a shared folder must be able to open the file, to see that it is held.
        assert (folder.parent / ".a.lock").stat().st_mode & 0o777 == 0o666
        first.send_signal(signal.SIGKILL)
    with locked(folder, patience=5):
        pass
    assert not list(tmp_path.rglob(".*"))


def test_a_folder_has_one_lock_under_the_name_of_a_link_to_it_too(tmp_path: Path) -> None:
    folder, link = tmp_path / "disk" / "a", tmp_path / "link"
    folder.mkdir(parents=True)
    link.symlink_to(folder)
    for first, second in ((folder, link), (link, folder)):
        with locked(first), pytest.raises(UserError, match=rf"{second}: is in use by process"), locked(second):
            pass


def test_a_link_to_nothing_is_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone/disk")
    for path in (tmp_path / "runs", tmp_path / "runs" / "a"):
        with pytest.raises(
            UserError, match=rf"^{tmp_path}/runs: is a link to gone/disk, where nothing is; make a folder "
        ):
            check_writable(path)
    (tmp_path / "gone" / "disk").mkdir(parents=True)
    check_writable(tmp_path / "runs" / "a")


def test_the_root_of_all_folders_can_be_locked() -> None:
    with locked(Path("/")):
        pass


def test_an_output_file_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "out.npy"
    with claimed_output(file):
        with pytest.raises(UserError, match=r"out.npy: is in use by process \d+ on "), claimed_output(file):
            pass
        file.touch()
    with pytest.raises(UserError, match=r"out.npy: already exists; "), claimed_output(file):
        pass
    with claimed_output(file, overwrite=True) as target:
        assert target == file
    # Where nothing is made, no folder is left.
    with pytest.raises(UserError, match="wrong"), claimed_output(tmp_path / "deep" / "er" / "out.npy"):
        raise UserError("wrong")
    assert [*tmp_path.rglob("*")] == [file]


def test_a_file_that_is_written_under_the_name_of_a_link_is_that_which_the_link_names(tmp_path: Path) -> None:
    file, link = tmp_path / "disk" / "table.md", tmp_path / "table.md"
    file.parent.mkdir()
    file.write_text("old")
    link.symlink_to("disk/table.md")
    with atomic_write(link) as stream:
        stream.write("new")
    assert file.read_text() == "new" and link.is_symlink()
    assert [*file.parent.iterdir()] == [file]


def test_a_device_or_a_pipe_is_no_output_file(tmp_path: Path) -> None:
    """To rename a file to /dev/null, as root may, would replace it for every program of the machine."""
    os.mkfifo(tmp_path / "pipe")
    for place in ("/dev/null", "/dev/stdout", tmp_path / "pipe"):
        with pytest.raises(UserError, match="is a device or a pipe, in whose place a file would come; name a file"):
            check_output_file(place, overwrite=True)


def test_a_file_that_another_process_has_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def waiting(file: Path) -> Iterator[None]:
        file.write_text("theirs")
        yield

    monkeypatch.setattr(files, "locked", waiting)
    with pytest.raises(UserError, match="already exists"), claimed_output(tmp_path / "out.npy"):
        pass
    assert (tmp_path / "out.npy").read_text() == "theirs"


def test_a_signal_while_a_folder_is_locked_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "run"):
        pass
    assert not [*tmp_path.iterdir()]


def test_a_missing_file_is_answered_by_the_one_that_is_spelled_like_it(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    with pytest.raises(UserError, match=rf"trian.csv: no such data file; did you mean {tmp_path}/train.csv\?$"):
        existing_file(tmp_path / "trian.csv", "data file")
    for other in ("dev.csv", "nowhere/train.csv", "."):
        with pytest.raises(UserError, match=r"no such data file; check the path$"):
            existing_file(tmp_path / other, "data file")


def test_a_folder_whose_lock_file_can_not_be_made_is_not_called_busy(tmp_path: Path) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs a file system that refuses files")
    with locked(Path("/proc/stepjepa"), patience=0.05):
        pass
