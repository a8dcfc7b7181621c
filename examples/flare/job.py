"""The job: `python job.py PLAN OUT [--export DIR] [--names a,b,c]`.

By itself it runs in FLARE's simulator on this machine; with --export it writes the job for `nvflare job submit`.
"""

import argparse
from pathlib import Path

from controller import Releases
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

import veilstream as vs

HERE = Path(__file__).parent


def make_job(plan: Path, out: Path, names: list[str], keys: str = "") -> FedJob:
    """A controller for the server, and the script for each site."""
    vs.Plan.load(plan)  # refuse what is no plan before anything starts
    job = FedJob(name="veilstream", min_clients=len(names))
    job.to_server(Releases(plan.read_text(), str(out.absolute()), names, keys))
    for name in names:
        words = f"{(out / 'sites').absolute()} {' '.join(names)}"
        job.to(ScriptRunner(script=str(HERE / "site_script.py"), script_args=words, framework="raw"), name)
    return job


def main() -> None:
    """Run or export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", default="north,south,west")
    parser.add_argument("--keys", default="")
    parser.add_argument("--export", type=Path)
    asked = parser.parse_args()
    job = make_job(asked.plan, asked.out, asked.names.split(","), asked.keys)
    if asked.export:
        job.export_job(str(asked.export))
    else:
        job.simulator_run(str(asked.out / "flare"), threads=len(asked.names.split(",")))


if __name__ == "__main__":
    main()
