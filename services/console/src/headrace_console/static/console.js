// Live parts of pages. Every page works without this file; it only fetches changed parts again.
// The stream /live names changed topics. The part of the page with `data-live` of that topic then fetches itself (hx-get).
const part = document.getElementById("live");
const button = document.getElementById("pause");
const POLL_MS = 10_000;
const PAUSED = "headrace-paused";
let source = null;
let timer = 0;

const isPaused = () => localStorage.getItem(PAUSED) === "yes";
const refresh = () => part.dispatchEvent(new CustomEvent("changed"));

function follow() {
  if (source !== null || document.hidden || isPaused()) return;
  source = new EventSource("/live");
  source.addEventListener("changed", (event) => {
    if (event.data.split(" ")[0] === part.dataset.live) refresh();
  });
  source.onopen = () => {
    clearInterval(timer);
    timer = 0;
    refresh();
  };
  source.onerror = () => {
    timer ||= setInterval(refresh, POLL_MS);
  };
}

function stop() {
  source?.close();
  source = null;
  clearInterval(timer);
  timer = 0;
}

function showState() {
  button.setAttribute("aria-pressed", String(isPaused()));
  if (isPaused()) stop();
  else follow();
}

if (part !== null) {
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : follow()));
  button.hidden = false;
  button.addEventListener("click", () => {
    localStorage.setItem(PAUSED, isPaused() ? "no" : "yes");
    showState();
  });
  showState();
}
