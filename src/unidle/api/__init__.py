"""The Python API: `train`, `resume`, `load`, and the runs that they return."""

from unidle.api.build import Build as Build
from unidle.api.job import Job as Job
from unidle.api.job import fit_to_env as fit_to_env
from unidle.api.job import maker_for as maker_for
from unidle.api.job import maker_of as maker_of
from unidle.api.job import resolve_job as resolve_job
from unidle.api.trained import TrainedGroup as TrainedGroup
from unidle.api.trained import TrainedRun as TrainedRun
from unidle.api.trained import load as load
from unidle.api.training import resume as resume
from unidle.api.training import resume_group as resume_group
from unidle.api.training import start as start
from unidle.api.training import start_group as start_group
from unidle.api.training import start_without_folder as start_without_folder
from unidle.api.training import train as train
