"""pretrain_llama.py whose iterations take their time until a file is there, so that a test can interrupt the run.

Environment: PACE_UNTIL, the file; PACE_SECONDS, what an iteration takes at least until then.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

from megatron_snip.train.step import Stepper

PROGRAM = Path(__file__).resolve().parents[3] / "pretrain_llama.py"

if __name__ == "__main__":
    step, until = Stepper.step, Path(os.environ["PACE_UNTIL"])
    seconds = float(os.environ["PACE_SECONDS"])

    def paced(self: Stepper, *args: Any, **more: Any) -> Any:
        if not until.exists():
            time.sleep(seconds)
        return step(self, *args, **more)

    Stepper.step = paced  # type: ignore[method-assign]
    runpy.run_path(str(PROGRAM), run_name="__main__")
