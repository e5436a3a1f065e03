"""A service for systemd or Kubernetes, as described in docs/deployment.md.

    python examples/service.py [HOST [PORT [HEALTH_PORT]]]

The service listens on HOST (default: all addresses), PORT (default: 7471) and HEALTH_PORT (default:
8080). A request consists of a message that contains a number of parts, followed by one message for
each part. The response is a single message with all parts. On SIGTERM, the service finishes the
requests in progress and then exits.
"""

import asyncio
import os
import signal
import socket
import sys

import aiordma


async def work(conn: aiordma.Connection) -> None:
    async for count in conn:
        parts = [bytes(await conn.recv()) for _ in range(int(bytes(count)))]
        await conn.send(parts)


def notify(state: str) -> None:
    """Notify systemd if it started this process (sd_notify(3))."""
    if name := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), name.replace("@", "\0", 1) if name[0] == "@" else name)


async def watchdog() -> None:
    """Periodically tell systemd that the event loop is running.

    The interval is half the time set by WatchdogSec= in the unit file.
    """
    while microseconds := os.environ.get("WATCHDOG_USEC"):
        notify("WATCHDOG=1")
        await asyncio.sleep(int(microseconds) / 2e6)


async def main(host: str = "", port: str = "7471", health_port: str = "8080") -> None:
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    server = await aiordma.start_server(work, host, int(port))

    async def health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to a health probe.

        A probe of /ready succeeds only if the server accepts a connection. All other probes
        succeed immediately.
        """
        status = "200 OK"
        try:
            async with asyncio.timeout(5):
                request = await reader.readuntil(b"\r\n\r\n")
                if request.startswith(b"GET /ready "):
                    await (await aiordma.connect(*server.address[:2])).close()
        except Exception as error:
            status = f"503 {type(error).__name__}"
        answer = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        writer.write(answer.encode())
        writer.close()

    async def stop() -> None:
        await terminated.wait()
        notify("STOPPING=1")
        await server.close(grace=20)

    async with server, await asyncio.start_server(health, None, int(health_port)) as probes:
        stopping = asyncio.create_task(stop())
        beating = asyncio.create_task(watchdog())
        notify("READY=1")
        print(f"service on {server.device}, port {server.port}", flush=True)
        address, number = probes.sockets[0].getsockname()[:2]
        print(f"probes on {address}, port {number}", flush=True)
        await server.serve_forever()  # raises if the device fails, and systemd restarts the service
        await stopping
        beating.cancel()


if len(sys.argv) > 4:
    sys.exit(__doc__)
try:
    asyncio.run(main(*sys.argv[1:]))
except (aiordma.RDMAError, OSError, ValueError) as error:  # such as an address in use
    sys.exit(f"service: {error}")
