"""Ray Serve before two servers: each replica starts one and passes what it is asked on. `serve run ray_serve:app`.

Needs `pip install "ray[serve]"`, and `steploop` on the path of the replicas; STEPLOOP_* set the servers, as elsewhere.
Ray asks the replica that has fewer requests. It knows nothing of cached prompts, as a [[models]] list does.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp  # comes with ray[serve]
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

OF_ONE_HOP = {"connection", "content-length", "host", "keep-alive", "te", "transfer-encoding", "upgrade"}


@serve.deployment(num_replicas=2, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Steploop:
    async def __init__(self) -> None:
        socket = Path(tempfile.mkdtemp()) / "steploop.sock"
        self._server = await asyncio.create_subprocess_exec("steploop", "serve", "--bind", f"unix:{socket}")
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2)
        self._session = aiohttp.ClientSession("http://steploop", connector=connector, timeout=timeout)
        while not await self._is_ready():
            if self._server.returncode is not None:
                raise RuntimeError("the server has ended: its log says why")
            await asyncio.sleep(0.1)

    async def _is_ready(self) -> bool:
        try:
            async with self._session.get("/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def check_health(self) -> None:
        if not await self._is_ready():
            raise RuntimeError("the server is not ready")

    async def __call__(self, request: Request) -> StreamingResponse:
        fields = [(name, value) for name, value in request.headers.items() if name not in OF_ONE_HOP]
        answer = await self._session.request(
            request.method, str(request.url.path), params=request.url.query, headers=fields, data=await request.body()
        )
        passed = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_HOP}

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.content.iter_any():
                    yield piece
            finally:
                answer.close()  # a client that leaves ends its generation

        return StreamingResponse(body(), answer.status, passed)

    def __del__(self) -> None:
        if self._server.returncode is None:
            self._server.terminate()


app = Steploop.bind()
