// The theme that was chosen here before, set ahead of the first paint. Without a choice the system's counts.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("iota-theme"); } catch { chosen = null; } // storage may be forbidden
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
