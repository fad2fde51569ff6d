"""`LocalEnvironment`: Harbor tasks in a bubblewrap sandbox on this machine, for tests and trusted tasks.

    start  -> bwrap ... sleep infinity     its own mounts, processes, host name (and network, if the task has none)
    exec   -> nsenter into it              background processes of a command live until `stop`
    files  -> tar through exec             no path inside is ever opened from outside

The programs are this machine's (/usr and /etc, read-only): a task's Dockerfile is not built. Everything else is in an
in-memory file system that disappears with the sandbox, and the sandbox ends with the process that started it.

It is **no boundary against a hostile model**: the kernel is shared, and if the run has root rights, so has the sandbox.

Needs `bwrap`, `nsenter` and `setpriv` (Debian: bubblewrap, util-linux); terminus-2 also `tmux`. No import of Treadle.
"""

import asyncio
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_TOOLS = {"bwrap": "bubblewrap", "nsenter": "util-linux", "setpriv": "util-linux", "tar": "tar", "bash": "bash"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OUTPUT = 16 * 2**20  # bytes kept of each output stream of a command
_DIRECTORIES = (
    "app",
    "home",
    "logs/agent",
    "logs/artifacts",
    "logs/verifier",
    "root",
    "solution",
    "tests",
    "tmp",
    "var",
)
_GRACE = 10.0  # seconds for the sandbox to start
_LINGER = 0.5  # seconds of further reading after a command has ended


def missing_tools() -> str:
    """Return how to install missing programs for these sandboxes, in a line; "" if nothing is missing."""
    packages = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    return f"apt-get install {' '.join(packages)}" if packages else ""


class LocalEnvironment(BaseEnvironment):
    """Runs a trial in one bubblewrap sandbox. size_mb: size of its in-memory files."""

    def __init__(self, *args: Any, size_mb: int = 2048, **kwargs: Any) -> None:
        self._size = size_mb * 2**20
        self._sandbox: asyncio.subprocess.Process | None = None
        self._init = 0  # pid of the sandbox's first process on this machine
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return the environment's name in Harbor."""
        return "treadle-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Return that it can disable the network, and no other capability."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def preflight(cls) -> None:
        """Raise SystemExit if a program is missing."""
        if missing := missing_tools():
            raise SystemExit(f"the local environment needs more programs: {missing}")

    def _validate_definition(self) -> None:
        # A Dockerfile is neither needed nor built.
        pass

    async def start(self, force_build: bool) -> None:
        """Start the sandbox and create the directories that Harbor and the task expect."""
        if missing := missing_tools():
            raise RuntimeError(f"the local environment needs more programs: {missing}")
        ready, tell = os.pipe()
        try:
            self._sandbox = await asyncio.create_subprocess_exec(
                *self._command(tell),
                pass_fds=(tell,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(tell)
        self._init = await self._first_process(ready)
        await self.ensure_dirs([*self._mount_targets(writable_only=True), self._directory])
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Kill all processes in the sandbox; its files disappear with it."""
        sandbox, self._sandbox, self._init = self._sandbox, None, 0
        if sandbox is None:
            return
        if sandbox.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # The rest dies with it (--die-with-parent).
                sandbox.kill()
        await sandbox.communicate()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with bash. Raises RuntimeError on a timeout, as Harbor's own environments do."""
        directory = shlex.quote(cwd or self._directory)
        words = ["bash", "-c", f"cd {directory} || exit 125\n{command}"]
        if (user := self._resolve_user(user)) not in (None, "root", 0, "0"):
            words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words]
        try:
            status, out, err = await asyncio.wait_for(self._run(words, env=self._merge_env(env)), timeout_sec)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        return ExecResult(stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace"), return_code=status)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the sandbox."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(str(source_path), arcname=os.path.basename(target_path))
        await self._unpack(packed.getvalue(), os.path.dirname(target_path) or "/")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a directory's contents into one of the sandbox."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(str(source_dir), arcname=".")
        await self._unpack(packed.getvalue(), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the sandbox."""
        status, out, err = await self._run(["cat", "--", source_path])
        if status:
            raise FileNotFoundError(f"{source_path}: {err.decode(errors='replace').strip()}")
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(out)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a directory's contents out of the sandbox: files, directories and links that stay inside."""
        status, out, err = await self._run(["tar", "-C", source_dir, "-cf", "-", "."])
        if status:
            raise RuntimeError(f"{source_dir}: {err.decode(errors='replace').strip()}")
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(out)) as archive:
            for member in archive:
                if not member.isdev():
                    archive.extract(member, target_dir, filter="data")

    @property
    def _directory(self) -> str:
        return self.task_env_config.workdir or "/app"

    def _command(self, tell: int) -> list[str]:
        return [
            *("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *(["--unshare-net"] if self._network_disabled else []),
            *(["--unshare-user", "--uid", "0", "--gid", "0"] if os.geteuid() else []),
            *("--hostname", "sandbox", "--clearenv", "--info-fd", str(tell)),
            *("--size", str(self._size), "--tmpfs", "/"),
            *("--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"),
            *(word for name in ("bin", "lib", "lib64", "sbin") for word in ("--symlink", f"usr/{name}", f"/{name}")),
            *("--dev", "/dev", "--proc", "/proc"),
            *(word for name in _DIRECTORIES for word in ("--dir", f"/{name}")),
            *("--chmod", "1777", "/tmp", "--chdir", "/"),
            *("/usr/bin/sleep", "infinity"),
        ]

    async def _first_process(self, ready: int) -> int:
        """Return the sandbox's first process, once its root is in place. Raises RuntimeError if that fails."""
        assert self._sandbox is not None and self._sandbox.stderr is not None
        loop = asyncio.get_running_loop()
        with os.fdopen(ready) as pipe:
            text = await loop.run_in_executor(None, pipe.read)
        deadline = loop.time() + _GRACE
        while text and self._sandbox.returncode is None and loop.time() < deadline:
            pid = int(json.loads(text)["child-pid"])
            # Its child is `sleep` once all is mounted.
            with contextlib.suppress(OSError, IndexError):
                [child, *_] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or [""]
                if os.readlink(f"/proc/{child}/exe").endswith("/sleep"):
                    return pid
            await asyncio.sleep(0.005)
        problem = (await self._sandbox.stderr.read()).decode(errors="replace") if not text else "it did not come up"
        raise RuntimeError(f"bwrap could not start a sandbox: {problem.strip() or self._sandbox.returncode}")

    async def _run(
        self, words: list[str], *, stdin: bytes | None = None, env: dict[str, str] | None = None
    ) -> tuple[int, bytes, bytes]:
        """Run a program in the sandbox; return status and the first `_OUTPUT` bytes of its outputs."""
        if not self._init:
            raise RuntimeError("the sandbox is not running")
        variables = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "xterm-256color", **(env or {})}
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self._init), "--mount", "--pid", "--ipc", "--uts"),
            *(["--net"] if self._network_disabled else []),
            *(["--user", "--preserve-credentials"] if os.geteuid() else []),
            *(f"--root=/proc/{self._init}/root", f"--wd=/proc/{self._init}/root"),
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
            *("env", "-i", *(f"{name}={value}" for name, value in variables.items()), *words),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        out, err = bytearray(), bytearray()
        copying = [asyncio.ensure_future(_copy(process.stdout, out)), asyncio.ensure_future(_copy(process.stderr, err))]
        try:
            await _feed(process, stdin)
            status = await process.wait()
            # Background processes may hold its outputs open.
            await asyncio.wait(copying, timeout=_LINGER)
            return status, bytes(out), bytes(err)
        finally:
            for copied in copying:
                copied.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    async def _unpack(self, packed: bytes, directory: str) -> None:
        quoted = shlex.quote(directory)
        words = ["bash", "-c", f"mkdir -p {quoted} && tar -C {quoted} --no-same-owner -xf -"]
        status, _, err = await self._run(words, stdin=packed)
        if status:
            raise RuntimeError(f"upload to {directory} failed: {err.decode(errors='replace').strip()}")


async def _copy(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    """Append the first `_OUTPUT` bytes to `kept`, and drain the rest, so that the writer never blocks."""
    assert stream is not None
    while data := await stream.read(2**16):
        kept += data[: max(0, _OUTPUT - len(kept))]


async def _feed(process: asyncio.subprocess.Process, stdin: bytes | None) -> None:
    if stdin is None or process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()
