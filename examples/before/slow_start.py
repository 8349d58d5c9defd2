"""What a worker looks like to uvicorn while it loads: for LOAD_SECONDS no thread of it runs any Python.

    uvicorn examples.before.slow_start:app --workers 4

Reading and converting weights does that in pieces; here it is one piece, so that the outcome does not depend on luck.
"""

import ctypes
import os

from fastapi import FastAPI

print(f"loading in process {os.getpid()}", flush=True)
ctypes.PyDLL(None).usleep(int(float(os.environ.get("LOAD_SECONDS", "8")) * 1_000_000))
print(f"loaded  in process {os.getpid()}", flush=True)

app = FastAPI()


@app.get("/health")
def health():
    return {"status": "ok"}
