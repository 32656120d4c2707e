// Keys. Every page works without this file. A key presses the button or link that names it in `aria-keyshortcuts`, or
// focuses such a field; `data-key` names two keys that are pressed one after the other. j and k move in lists.
const dialog = document.getElementById("shortcuts");
const opener = document.getElementById("keys");
const choice = document.getElementById("single-keys");
const OFF = "headrace-keys-off";
const NEXT_KEY_MS = 2_000;
let first = { key: "", timeStamp: -Infinity };

function find(key) {
  const selector = `[aria-keyshortcuts="${CSS.escape(key)}"], [data-key="${CSS.escape(key)}"]`;
  const scopes = [document.activeElement.closest(".turn"), document.querySelector(".turn:target"), document];
  return scopes.map((scope) => scope?.querySelector(selector)).find((item) => item);
}

function move(step) {
  const items = [...document.querySelectorAll("main tbody th a, main .turn")].filter((item) => item.checkVisibility());
  const at = items.findIndex((item) => item.contains(document.activeElement)) + step;
  items[Math.min(Math.max(at, 0), items.length - 1)]?.focus();
}

function press(event) {
  if (event.altKey || event.metaKey || event.repeat || event.isComposing || dialog.open) return;
  const inText = event.target.closest("input, textarea, select") !== null;
  if (!event.ctrlKey && (inText || !choice.checked)) return;
  const follows = event.timeStamp - first.timeStamp < NEXT_KEY_MS;
  const key = event.ctrlKey ? `Control+${event.key}` : follows ? `${first.key} ${event.key}` : event.key;
  first = { key: event.key, timeStamp: key === "g" ? event.timeStamp : -Infinity };
  const item = find(key);
  if (item) event.preventDefault();
  if (item?.matches("input")) item.focus();
  else if (item) item.click();
  else if (key === "j" || key === "k") move(key === "j" ? 1 : -1);
}

choice.checked = localStorage.getItem(OFF) !== "yes";
choice.addEventListener("change", () => localStorage.setItem(OFF, choice.checked ? "no" : "yes"));
opener.hidden = false;
opener.addEventListener("click", () => dialog.showModal());
document.addEventListener("keydown", press);
