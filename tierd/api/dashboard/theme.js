// Before the first paint: the theme that was chosen here, else the system's.
"use strict";
(() => {
  const order = ["system", "light", "dark"];
  const root = document.documentElement;
  let chosen = "system";
  try {
    chosen = localStorage.getItem("tierd-theme") || "system";
  } catch {
    // No storage: the system's theme.
  }
  const apply = () => {
    if (chosen === "system") delete root.dataset.theme;
    else root.dataset.theme = chosen;
  };
  apply();
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => (button.textContent = `Theme: ${chosen}`);
    const told = () => dispatchEvent(new Event("theme"));
    show();
    button.addEventListener("click", () => {
      chosen = order[(order.indexOf(chosen) + 1) % order.length];
      try {
        localStorage.setItem("tierd-theme", chosen);
      } catch {
        // It holds for this page only.
      }
      apply();
      show();
      told();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", told);
  });
})();
