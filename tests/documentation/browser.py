"""Pages in a browser without a window, where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
#: Of a phone and of a laptop, in pixels.
WIDTHS = (360, 1280)
#: Shows one page after another in a frame, and then which of them are wider than it.
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
  document.body.textContent = JSON.stringify(found);
}
look(PAGES, WIDTHS);
</script>"""
OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root needs; the pages are our own
    "--disable-gpu",
    "--allow-file-access-from-files",  # the frame's page is another file
    "--virtual-time-budget=600000",
    "--dump-dom",
)


def too_wide(pages: list[Path]) -> list[tuple[Path, int]]:
    """Which pages are wider than which window; none where there is no browser."""
    if BROWSER is None:
        return []
    addresses = {page.as_uri(): page for page in pages}
    with TemporaryDirectory() as folder:
        script = Path(folder, "look.html")
        script.write_text(SCRIPT.replace("PAGES", json.dumps(list(addresses))).replace("WIDTHS", json.dumps(WIDTHS)))
        run = subprocess.run([BROWSER, *OPTIONS, script.as_uri()], capture_output=True, text=True, timeout=600)
    found = re.search(r"<body>(\[.*\])</body>", run.stdout, re.DOTALL)
    if found is None:
        raise RuntimeError(f"The browser did not look at all pages: {run.stdout[-500:]} {run.stderr[-500:]}")
    return [(addresses[address], width) for address, width in json.loads(found[1])]
