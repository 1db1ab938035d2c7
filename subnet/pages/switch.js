// The switch for the colours: as the system, light, dark.
const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

export function themeSwitch(button, failed) {
  const show = (name) => {
    button.textContent = THEMES[name][0];
    button.title = `Colours: ${THEMES[name][1]}`;
    button.setAttribute("aria-label", button.title);
  };
  const choose = (name) => {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    try { localStorage.setItem("iota-theme", name); } catch { failed("The theme can't be kept: storage is off"); }
    show(name);
    dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    choose(names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
  show(document.documentElement.dataset.theme ?? "");
}
