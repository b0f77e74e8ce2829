"""Passes the recording on to the workers of a Ray cluster that runs already. Loaded by bootstrap/sitecustomize.py.

The workers of a cluster that the job starts itself inherit it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from ..options import VARIABLE, RecordingOptions
from .collection import job_environment

HOOK_VARIABLE = "RAY_RUNTIME_ENV_HOOK"
"""Ray's variable: a function that `ray.init` calls with the runtime environment of the job."""


def attach(ray: Any) -> None:
    """Make `ray.init` of this process pass the recording on to the workers of a cluster that runs already.

    A hook of the user's own stays, and only actors of a cluster that the job starts itself are recorded.
    """
    initialize = ray.init

    @functools.wraps(initialize)
    def init(*arguments: Any, **options: Any) -> Any:
        if HOOK_VARIABLE in os.environ:
            return initialize(*arguments, **options)
        os.environ[HOOK_VARIABLE] = (
            f"{__name__}.add_recording"  # not for longer: a child may not find the module
        )
        try:
            return initialize(*arguments, **options)
        finally:
            os.environ.pop(HOOK_VARIABLE, None)

    ray.init = init


def add_recording(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return Ray's runtime environment with the environment variables that start the recorder in each worker."""
    environment = dict(runtime_env or {})
    if VARIABLE not in os.environ:  # removed by the job
        return environment
    variables = job_environment(RecordingOptions.from_environment())
    own_variables = dict(environment.get("env_vars") or {})
    bootstrap = variables.pop("PYTHONPATH").split(os.pathsep)[0]
    # Ray replaces the variable by that of the node.
    variables["PYTHONPATH"] = os.pathsep.join([bootstrap, own_variables.pop("PYTHONPATH", "${PYTHONPATH}")])
    return environment | {"env_vars": own_variables | variables}
