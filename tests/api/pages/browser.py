"""A headless Chromium, driven over the DevTools protocol.

That needs a WebSocket, which aiohttp has, and no driver that would have to fit the browser's version.
"""

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which cannot be had as root, and the pages are our own
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
)
PATIENCE = 30.0  # seconds until a test fails instead of waiting on
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
CONTROL = 2


class PageError(AssertionError):
    """What was evaluated in the page has thrown."""


@dataclass
class Browser:
    """One process of Chromium. Pages share nothing: each has a profile of its own."""

    socket: aiohttp.ClientWebSocketResponse
    replies: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    pages: dict[str, "Page"] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self.numbers)
        self.replies[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json(
            {"id": number, "method": method, "params": params} | ({} if session is None else {"sessionId": session})
        )
        async with asyncio.timeout(PATIENCE):
            return await self.replies[number]

    async def receive(self) -> None:
        async for frame in self.socket:
            message = json.loads(frame.data)
            if "id" in message:
                reply = self.replies.pop(message["id"])
                if reply.done():
                    continue
                if "error" in message:
                    reply.set_exception(PageError(message["error"]["message"]))
                else:
                    reply.set_result(message["result"])
            elif (page := self.pages.get(message.get("sessionId", ""))) is not None:
                page.note(message["method"], message["params"])

    @asynccontextmanager
    async def page(self, url: str, *, width: int = 1280, height: int = 800, is_dark: bool = False) -> "AsyncIterator[Page]":
        """A page at `url`, loaded. Fails on leaving where anything in it has thrown, or was refused by the page's policy."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = (await self.send("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self.pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log"):
                await page.send(f"{domain}.enable")
            await page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
            await page.emulate_dark(is_dark)
            await page.send("Page.navigate", url=url)
            await page.wait_for("document.readyState === 'complete'")
            yield page
            assert page.problems == []
        finally:
            del self.pages[session]
            await self.send("Target.disposeBrowserContext", browserContextId=context)


@dataclass
class Page:
    browser: Browser
    session: str
    problems: list[str] = field(default_factory=list)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, method: str, **params: Any) -> Any:
        return await self.browser.send(method, self.session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error" and params["entry"]["source"] != "network":
            self.problems.append(params["entry"]["text"])

    async def reload(self) -> None:
        """What is asked of the old document while the new one comes would never be answered."""
        self.loaded.clear()
        await self.send("Page.reload")
        async with asyncio.timeout(PATIENCE):
            await self.loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, of a promise's result where it is one."""
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Until the expression is true, which is tried for each frame."""
        try:
            await self.evaluate(f"new Promise((met) => {{ const look = () => ({condition}) ? met() : setTimeout(look, 5); look(); }})")
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never came true: {condition}; the page says:\n{shown}") from None

    async def text(self, selector: str) -> str:
        text: str = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    async def wait_for_text(self, selector: str, text: str) -> None:
        await self.wait_for(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")

    async def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is there: fails where something lies over it."""
        found = json.dumps(selector)
        await self.wait_for(f"document.querySelector({found})?.checkVisibility({{ visibilityProperty: true }})")
        x, y, is_on_top = await self.evaluate(
            f"""(() => {{ const it = document.querySelector({found}); it.scrollIntoView({{ block: 'nearest', behavior: 'instant' }});
            const box = it.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            return [x, y, it.contains(document.elementFromPoint(x, y))]; }})()"""
        )
        assert is_on_top, f"something lies over {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def fill(self, selector: str, text: str) -> None:
        """Replaces what the field holds, by the keyboard."""
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus(); document.activeElement.select()")
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, control: bool = False) -> None:
        code, modifiers = KEYS[key], CONTROL if control else 0
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": "\r"} if key == "Enter" else {}))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def emulate_dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """As PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """`profile` is an empty directory. Raises where Chromium does not start, with what it says."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    try:
        said = ""
        async with asyncio.timeout(PATIENCE):
            while (address := re.search(r"DevTools listening on (ws://\S+)", said)) is None:
                line = await process.stderr.readline()
                if not line:
                    raise AssertionError(f"Chromium did not start: {said}")
                said += line.decode(errors="replace")
        drain = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as http, http.ws_connect(address[1], max_msg_size=0) as socket:
            browser = Browser(socket)
            receiver = asyncio.create_task(browser.receive())
            yield browser
            receiver.cancel()
            drain.cancel()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
