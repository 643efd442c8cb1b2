// The theme, before the first paint, and which of the two views is shown. No module: a module would run after the paint.
"use strict";

const THEMES = { "": "System theme", light: "Light theme", dark: "Dark theme" };
const THEME_KEY = "penstock.theme";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // Forbidden, or full: the theme lasts as long as the page.
  }
}

function keptTheme() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

function showTheme() {
  const button = document.getElementById("theme");
  button.textContent = THEMES[document.documentElement.dataset.theme];
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  showTheme();
}

function showView() {
  const name = location.hash === "#live" ? "live" : "chat";
  for (const view of ["chat", "live"]) {
    document.getElementById(`${view}-view`).hidden = view !== name;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name === "live" ? "Penstock: live" : "Penstock";
}

setTheme(keptTheme() in THEMES ? keptTheme() : "");
document.addEventListener("DOMContentLoaded", () => {
  showTheme();
  showView();
  document.getElementById("theme").addEventListener("click", nextTheme);
});
addEventListener("hashchange", showView);
