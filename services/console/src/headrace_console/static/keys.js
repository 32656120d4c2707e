// Single keys of the page of an item: a key presses the button with its `data-key`. Every button works without this file.
const button = document.getElementById("keys");
const OFF = "headrace-keys-off";
const areOn = () => localStorage.getItem(OFF) !== "yes";
const show = () => button.setAttribute("aria-pressed", String(areOn()));

button.hidden = false;
button.addEventListener("click", () => {
  localStorage.setItem(OFF, areOn() ? "yes" : "no");
  show();
});
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.metaKey || event.repeat) return;
  if (!event.ctrlKey && (!areOn() || event.target.closest("input, textarea, select"))) return;
  const key = event.ctrlKey ? `Control+${event.key}` : event.key;
  document.querySelector(`button[data-key="${CSS.escape(key)}"]`)?.click();
});
show();
