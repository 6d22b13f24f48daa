"""Pages in a browser without a window, where there is one."""

import json
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
#: Of a phone and of a laptop, in pixels.
WIDTHS = (360, 1280)
#: Shows one page after another in a frame, and then says which of them are wider than it.
SCRIPT = """<!doctype html><body><script>
async function look(pages, widths) {
  const frame = document.body.appendChild(document.createElement("iframe"));
  const found = [];
  for (const width of widths) {
    frame.width = width;
    for (const page of pages) {
      await new Promise(done => { frame.onload = done; frame.src = page; });
      const root = frame.contentDocument.documentElement;
      if (root.scrollWidth > root.clientWidth) found.push([page, width]);
    }
  }
  await fetch("/", { method: "POST", body: JSON.stringify(found) });
}
look(PAGES, WIDTHS);
</script>"""
#: Root needs the second, for pages of our own. The others keep the browser from asking other hosts.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",  # which keeps it open, and without output
)


class Answers(SimpleHTTPRequestHandler):
    """Serves the site and the script, and takes what the script found."""

    def __init__(self, *args, script: str, found: Queue[str], **kwargs) -> None:
        self.script, self.found = script, found
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if self.path != "/look":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.script.encode())

    def do_POST(self) -> None:
        self.found.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


def too_wide(site: Path, seconds: float = 180.0) -> list[tuple[str, int]]:
    """Which pages are wider than which window; none where there is no browser, `queue.Empty` where it does not answer."""
    if BROWSER is None:
        return []
    pages = [page.relative_to(site).as_posix() for page in sorted(site.rglob("*.html"))]
    script = SCRIPT.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    found = Queue[str]()
    answers = partial(Answers, directory=str(site), script=script, found=found)
    with TemporaryDirectory() as profile, ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/look"
        with subprocess.Popen(
            [BROWSER, *OPTIONS, f"--user-data-dir={profile}", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as browser:
            try:
                return [(page, width) for page, width in json.loads(found.get(timeout=seconds))]
            finally:
                browser.terminate()
                browser.wait()
                server.shutdown()
