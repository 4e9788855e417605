// Light or dark: the system's choice until the button is pressed.

const dark = matchMedia("(prefers-color-scheme: dark)");

export function startTheme(button) {
  let theme = stored();
  const isDark = () => (theme ? theme === "dark" : dark.matches);
  const show = () => {
    if (theme) document.documentElement.dataset.theme = theme;
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Show the page in ${isDark() ? "light" : "dark"} colours`);
  };
  button.onclick = () => {
    theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("trope-theme", theme); } catch { /* chosen for this visit */ }
    show();
  };
  dark.onchange = show;
  show();
}

function stored() {
  try { return localStorage.getItem("trope-theme"); } catch { return null; }
}
