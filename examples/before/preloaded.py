"""What `gunicorn --preload` does to a model on a CPU: the master warms it up, forks, and the workers hang.

    gunicorn examples.before.preloaded:app --preload --workers 2 --worker-class uvicorn_worker.UvicornWorker

The threads that compute in parallel belong to the master and are not there after a fork. Without `--preload` the same
application answers.
"""

import torch
from fastapi import FastAPI

app = FastAPI()
weights = torch.randn(2000, 2000)
weights.exp().sum()


@app.get("/")
async def forward():
    return float(weights.exp().sum())
