"""Forwards a port of the loopback to a unix socket: for programs that want TCP, in a sandbox without network.

Needs nothing but Python's standard library, so that the file can be mounted into a sandbox and run there:
`python3 forward.py PATH_OF_SOCKET PORT`. Prints the port once it listens; port 0 takes a free one.
"""

import asyncio
import contextlib
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError, RuntimeError, OSError):
        writer.write_eof()


async def serve(path: str, port: int) -> asyncio.Server:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        up = asyncio.create_task(_copy(reader, back))
        down = asyncio.create_task(_copy(there, writer))
        # A program that hangs up must be seen at the other end: its half is closed, then all of it.
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        if up.done() and not down.done():
            back.close()
        await asyncio.wait((down,))
        up.cancel()
        for end in (writer, back):
            end.close()

    return await asyncio.start_server(connected, "127.0.0.1", port)


async def main(path: str, port: int) -> None:
    server = await serve(path, port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
