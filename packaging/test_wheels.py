"""Time from `pip install` to the first answer, in a Debian 11 (glibc 2.31) without a compiler: `make test-wheels`.

    .venv/bin/python packaging/test_wheels.py --python python3.12 --python python3.14t --rounds 3

Installs the wheel of dist/ that fits the interpreter, by pip and by uv, with its dependencies from the index, uncached; serves
smollm2:135m, whose weights are in this machine's cache (`make pull`); asks one question. Debian 11 brings the C library
and the tools. Its own Python is 3.9, so this machine's stands in, copied with its standard library: one that runs with
glibc 2.31, as those of `uv python install` do. Needs mmdebstrap, uv (`make install-locked`) and user namespaces; no root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEBIAN = ROOT / "build/wheels/debian11"
MODEL = "smollm2:135m"
START_S = 300
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}
PASSED = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_CERT", "SSL_CERT_FILE", "HTTPS_PROXY", "https_proxy")
# Run as root of new namespaces: mounts what programs expect, then changes its root folder to the Debian.
ENTER = """
mount --rbind /dev "$0/dev" && mount --rbind /sys "$0/sys" && mount -t proc proc "$0/proc"
mount --bind "$1" "$0/root/cache/models" && mount --bind "$2" "$0/dist" && shift 2 && exec chroot "$0" "$@"
"""


def make_debian() -> None:
    if not (DEBIAN / ".complete").exists():
        shutil.rmtree(DEBIAN, ignore_errors=True)
        DEBIAN.mkdir(parents=True)
        # NumPy needs libstdc++, which every Debian has for apt. From the release alone: old security archives lose packages.
        main_only = 'sed -i "/bullseye-/d" "$1/etc/apt/sources.list"'
        command = ["mmdebstrap", "--quiet", "--variant=extract", "--include=libc6,libstdc++6,dash,coreutils"]
        # Through tar, since a folder that mmdebstrap writes belongs to another user, unless root runs it.
        archive = DEBIAN.with_suffix(".tar")
        subprocess.run([*command, f"--setup-hook={main_only}", "bullseye", archive], check=True)
        subprocess.run(["tar", "-x", "-f", archive, "-C", DEBIAN, "--exclude=./dev/*"], check=True)
        archive.unlink()
        (DEBIAN / ".complete").touch()
    assert not [*DEBIAN.glob("usr/bin/*g++*"), *DEBIAN.glob("usr/bin/*gcc*"), *DEBIAN.glob("usr/bin/cc")]
    for name in ("root/cache/models", "dist", "dev", "sys", "proc", "tmp", "etc/ssl/certs"):
        (DEBIAN / name).mkdir(parents=True, exist_ok=True)
    certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    for file in ("/etc/resolv.conf", "/etc/hosts", certificates):
        (DEBIAN / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, DEBIAN / file[1:])
    shutil.copy(shutil.which("uv") or sys.exit("error: uv is missing. Run make install-locked."), DEBIAN / "usr/bin/uv")


def inside(*words: str) -> list[str]:
    """Return the command that runs these words in the Debian."""
    models = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser() / "models"
    environment = [f"{name}={os.environ[name]}" for name in PASSED if name in os.environ]
    environment += ["PATH=/venv/bin:/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8", "PENSTOCK_CACHE=/root/cache"]
    enter = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
    return [*enter, str(DEBIAN), str(models), str(ROOT / "dist"), "/usr/bin/env", "-i", *environment, *words]


def copy_python(name: str) -> tuple[str, str]:
    """Copy an interpreter into the Debian. Returns its path there, and the name of the wheel that fits it."""
    report = "import json, sys; print(json.dumps([sys.base_prefix, sys.version_info[1], sys.abiflags, sys._base_executable]))"
    output = subprocess.run([name, "-c", report], capture_output=True, check=True).stdout
    prefix, minor, flags, executable = json.loads(output)
    if not (DEBIAN / prefix[1:]).exists():
        left_out = shutil.ignore_patterns("site-packages", "test", "__pycache__")
        shutil.copytree(prefix, DEBIAN / prefix[1:], symlinks=True, ignore=left_out)
    tag = f"cp3{minor}-cp3{minor}{flags}" if flags or minor < 12 else "cp312-abi3"
    wheels = sorted(ROOT.glob(f"dist/penstock-*-{tag}-manylinux*_{os.uname().machine}.whl"))
    if not wheels:
        sys.exit(f"error: dist has no wheel for {name} ({tag}). Run make wheels.")
    return str(Path(executable).resolve()), wheels[-1].name


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def ask(port: int, server: subprocess.Popen[bytes]) -> str:
    """Return the first answer of the server, asked again for `START_S` until it listens."""
    end = time.monotonic() + START_S
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(QUESTION).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            if server.poll() is not None:
                sys.exit(f"error: the server ended with {server.returncode}.")
            if time.monotonic() > end:
                sys.exit(f"error: the server does not answer within {START_S} s: {error}")
            time.sleep(0.02)


def measure(installer: str, python: str, wheel: str) -> None:
    shutil.rmtree(DEBIAN / "venv", ignore_errors=True)
    shutil.rmtree(DEBIAN / "root/cache/kernels", ignore_errors=True)
    subprocess.run(inside("uv", "venv", "--quiet", "--no-cache", "--seed", "--python", python, "/venv"), check=True)
    commands = {"pip": ("pip", "install", "--quiet", "--no-cache-dir"), "uv": ("uv", "pip", "install", "--quiet", "--no-cache")}
    target = ("--python", "/venv/bin/python") if installer == "uv" else ()
    port = free_port()
    began = time.monotonic()
    subprocess.run(inside(*commands[installer], *target, f"/dist/{wheel}"), check=True)
    installed = time.monotonic()
    with subprocess.Popen(inside("penstock", "serve", MODEL, "--port", str(port)), stdout=subprocess.DEVNULL) as server:
        try:
            answer = ask(port, server)
        finally:
            ended = time.monotonic()
            server.kill()
    assert "Paris" in answer, answer
    print(f"{wheel} by {installer}: {ended - began:.1f} s, {installed - began:.1f} of them to install. {answer!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="an interpreter, once or more (default: python3.12)")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    make_debian()
    for name in options.python or ["python3.12"]:
        python, wheel = copy_python(name)
        for _ in range(options.rounds):
            for installer in ("pip", "uv"):
                measure(installer, python, wheel)


if __name__ == "__main__":
    main()
