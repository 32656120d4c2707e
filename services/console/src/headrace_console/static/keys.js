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
  if (!areOn() || event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  if (event.target.closest("input, textarea, select")) return;
  document.querySelector(`button[data-key="${CSS.escape(event.key)}"]`)?.click();
});
show();
