const unpack = async packed => {
  const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).text();
};
const touch = matchMedia('(pointer: coarse)').matches, narrow = () => innerWidth < 600;
const ink = () => getComputedStyle(document.body).color;
const line = 'rgba(128,128,128,0.25)';
const layoutOf = own => ({
  height: narrow() ? 300 : 380, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', hovermode: 'closest',
  margin: {l: narrow() ? 48 : 70, r: 10, t: 30, b: 45}, dragmode: touch ? false : 'zoom', ...own,
  font: {color: ink(), size: 12, family: 'system-ui, sans-serif'},
  legend: {orientation: 'h', y: 1.02, yanchor: 'bottom'},
  modebar: {bgcolor: 'rgba(0,0,0,0)', color: 'rgba(128,128,128,0.6)', activecolor: 'rgb(128,128,128)'},
  xaxis: {gridcolor: line, zerolinecolor: line, automargin: true, exponentformat: 'e', ...own.xaxis},
  yaxis: {gridcolor: line, zerolinecolor: line, automargin: true, zeroline: false, exponentformat: 'e', ...own.yaxis},
});
const cells = (plans, step) => {
  const fresh = () => Array.from({length: 4 * plans.rows - 1}, () => Array(plans.columns).fill(null));
  const z = fresh(), text = fresh();
  plans.linears.forEach(([name, row, column], place) => {
    const option = plans.options[plans.steps[step][1].charCodeAt(place) - 48];
    if (option) for (let band = 0; band < 3; band++) {
      z[4 * row + band][column] = option[1 + band];
      text[4 * row + band][column] = name + ': ' + option[0];
    }
  });
  return {z: [z], text: [text]};
};
const addSlider = (picture, plans) => {
  const label = document.createElement('label'), words = document.createElement('span');
  const input = Object.assign(document.createElement('input'), {type: 'range', min: 0, max: plans.steps.length - 1});
  label.className = 'slider';
  const show = () => {
    words.textContent = plans.steps[input.value][0];
    Plotly.restyle(picture, cells(plans, input.value), [0]);
  };
  input.value = input.max;
  input.oninput = show;
  label.append(words, input);
  if (plans.steps.length < 2) input.hidden = true;
  picture.before(label);
  show();
};
const draw = async () => {
  const script = document.createElement('script');
  script.textContent = await unpack(document.getElementById('plotly').textContent);
  document.head.append(script);
  for (const json of document.querySelectorAll('script.figure')) {
    const figure = JSON.parse(json.textContent), picture = json.previousElementSibling;
    const settings = {responsive: true, displaylogo: false, displayModeBar: touch ? false : 'hover'};
    await Plotly.newPlot(picture, figure.data, layoutOf(figure.layout), settings);
    if (figure.plans) addSlider(picture, figure.plans);
  }
  document.documentElement.dataset.drawn = 'yes';
};
const system = matchMedia('(prefers-color-scheme: dark)'), root = document.documentElement.style;
const recolour = () => {
  for (const picture of document.querySelectorAll('.js-plotly-plot')) Plotly.relayout(picture, {'font.color': ink()});
};
document.getElementById('theme').onclick = () => {
  root.colorScheme = (root.colorScheme || (system.matches ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark';
  recolour();
};
system.addEventListener('change', recolour);
draw();
